"""Where ranks meet that may not all come: a store of rank 0's, and what each leaves in it as JSON.

No collective is needed, so one that is missing can be named, and a device can be judged alone.
"""

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mlperf_bert.common.errors import LostRanksError, UserError
from mlperf_bert.distributed.launch import RankInfo, open_store

_FAREWELL_S = 5.0  # for the others to read the last word of rank 0, whose process serves it
_POLL_S = 0.05
_ASKED_PER_S = 4000  # by all ranks together, while they wait
_MORE_S = 30.0  # of patience with a request to the store, over that with a rank


class MeetingError(UserError):
    """This rank cannot reach rank 0, or rank 0 has gone."""


class Meeting:
    """The ranks' common place. `send` is everyone's; `receive` and `announce` are rank 0's.

    `store` is a `torch.distributed.Store`, which torch's stubs lack.
    """

    def __init__(self, store: Any, info: RankInfo) -> None:
        self._info = info
        self.store = store

    def send(self, topic: str, value: Any) -> None:
        """Leave what rank 0 shall have."""
        self._guarded(lambda: self.store.set(f"{topic}/{self._info.rank}", json.dumps(value)))

    def receive(self, topic: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """What these ranks sent within that time; one that did not is left out."""
        ranks = list(ranks)
        self._wait([f"{topic}/{rank}" for rank in ranks], seconds)
        there = {rank: f"{topic}/{rank}" for rank in ranks if self.store.check([f"{topic}/{rank}"])}
        texts = self.store.multi_get(list(there.values())) if there else []
        return {rank: json.loads(text) for rank, text in zip(there, texts, strict=True)}

    def announce(self, topic: str, value: Any) -> None:
        """Tell the others."""
        self.store.set(topic, json.dumps(value))

    def hear(self, topic: str, seconds: float) -> Any:
        """What rank 0 announces. Raises MeetingError where it does not within that time."""

        def heard() -> Any:
            if not self._wait([topic], seconds):
                raise RuntimeError("not announced")
            return json.loads(self.store.get(topic))

        return self._guarded(heard)

    def part(self, others: int = 0) -> None:
        """Rank 0 stays until the others that came, which call this too, heard its last word."""
        with suppress(RuntimeError):  # a rank that is gone needs nothing any more
            if self._info.rank != 0:
                self.store.add("parted", 1)
                return
            _until(lambda: self.store.add("parted", 0) >= others, _FAREWELL_S, _POLL_S)

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Whether all keys were there in time."""
        # Not by the store's own wait: where that ends, torch prints what it thinks of it.
        return _until(
            lambda: self.store.check(keys),
            seconds,
            max(_POLL_S, self._info.world_size / _ASKED_PER_S),
        )

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError:
            remedy = "look at rank 0's output"
            raise MeetingError(
                f"rank {self._info.rank}", "rank 0 does not answer any more", remedy
            ) from None


def meet(info: RankInfo, timeout_s: float) -> Meeting:
    """Open rank 0's store, or reach it. Raises MeetingError where that takes over `timeout_s`.

    Raises ConfigError where rank 0 cannot serve it.
    """
    try:
        store = open_store(info, timedelta(seconds=timeout_s))
        store.set_timeout(timedelta(seconds=timeout_s + _MORE_S))
    except LostRanksError as error:
        raise MeetingError(*error.args) from None
    except RuntimeError as error:  # of torch's agent
        problem = f"cannot reach torchrun's store ({error})"
        raise MeetingError(f"rank {info.rank}", problem, "look at torchrun's output") from None
    names: Any = dist
    return Meeting(names.PrefixStore("doctor", store), info)


def _until(condition: Callable[[], bool], seconds: float, poll_s: float) -> bool:
    """Ask again and again; whether it came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True
