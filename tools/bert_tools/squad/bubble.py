"""Share of a pipeline's time that its ranks wait, measured from their work.

No torch. A bubble is the time of an update in which a rank computes nothing, as a share of all
ranks' time (GPipe, arXiv 1811.06965, section 2.3).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

# Forward, backward whole or for the inputs alone, backward for the weights alone.
Kind = Literal["F", "B", "W"]

SAME_CLOCK_S = 1.0  # clocks of two machines count from their own start


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A rank's work on one microbatch; begin and end in seconds of the update."""

    rank: int
    stage: int
    kind: Kind
    microbatch: int
    begin_s: float
    end_s: float


class StageClock:
    """Records when a rank's stages compute, between `start` and `stop`.

    `synchronize` is called at both ends of each span, to wait until the device has done its work;
    it slows a GPU down, so only some updates are measured.
    """

    def __init__(self, rank: int, synchronize: Callable[[], object] = lambda: None) -> None:
        self._is_running = False
        self._rank = rank
        self._synchronize = synchronize
        self._began = 0.0
        self._spans: list[Span] = []

    def start(self, of_first_rank: float | None = None) -> None:
        """Begin an update: its second 0 is now, or the given `perf_counter` time of rank 0.

        That time is when all ranks had met. Processes of one machine share a clock, so it is second
        0 for all of them; they leave a collective at different times.
        """
        self._is_running = True
        self._began = perf_counter()
        if of_first_rank is not None and abs(self._began - of_first_rank) < SAME_CLOCK_S:
            self._began = of_first_rank
        self._spans = []

    def stop(self) -> list[Span]:
        """End the update and return its spans."""
        self._is_running = False
        return self._spans

    @contextmanager
    def span(self, stage: int, kind: Kind, microbatch: int) -> Iterator[None]:
        """Record the work done within."""
        if not self._is_running:
            yield
            return
        self._synchronize()
        begin_s = perf_counter() - self._began
        yield
        self._synchronize()
        times = {"begin_s": begin_s, "end_s": perf_counter() - self._began}
        span = Span(rank=self._rank, stage=stage, kind=kind, microbatch=microbatch, **times)
        self._spans.append(span)


def measured_bubble(spans: Sequence[Span]) -> float:
    """1 - time computing / (ranks * time from the first begin to the last end)."""
    ranks = {span.rank for span in spans}
    whole = max(span.end_s for span in spans) - min(span.begin_s for span in spans)
    busy = sum(span.end_s - span.begin_s for span in spans)
    return 1 - busy / (len(ranks) * whole)
