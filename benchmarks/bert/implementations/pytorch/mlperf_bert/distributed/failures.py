"""Names the rank that failed or hangs: which one, on which host, and what it was doing."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Literal

import torch.distributed as dist

from mlperf_bert.common.errors import LostRanksError, UserError, one_line
from mlperf_bert.distributed.launch import RankInfo, host_name
from mlperf_bert.signals.heartbeat import POLL_S, Watch, end_process
from mlperf_bert.signals.whereabouts import Whereabouts

# A rank that hangs by itself says so before those that wait for it give up and have it killed;
# so these get more time, of their collectives first.
GRACE = timedelta(seconds=2)
# What a module waits for, by its own word: `WAITS_FOR` in it, whatever the module is called.
Waits = Literal["ranks", "loader", "storage", "device"]
_READING: tuple[Waits, ...] = ("loader", "storage")
_OURS = __name__.partition(".")[0] + "."
# Words of gloo's RuntimeErrors (torch 2.11 to 2.13), which have no type of their own.
_OF_GLOO = ("gloo/transport", "caused pair closure")
_SILENCE = ("timed out", "timeout")
_OF_THIS_HOST = ("failed to listen", "already in use")


@contextmanager
def naming_failures(
    info: RankInfo, whereabouts: Whereabouts | None, patience: timedelta
) -> Iterator[None]:
    """Say in every error of the body which rank it is of.

    A UserError gets it at its beginning, but for one of start-up, which all ranks raise together:
    a mistake is no rank's failure. Other ranks that are gone become a LostRanksError. Any other
    exception gets it as a note, which is the last line of its traceback.

    Args:
        info: of this rank.
        whereabouts: what it is doing; None where nobody keeps them.
        patience: how long other ranks have for an answer.
    """
    try:
        yield
    except UserError as error:
        if whereabouts is None or whereabouts.in_start_up:
            raise
        where, problem, remedy = error.args
        raise type(error)(f"{_here(info, whereabouts)}: {where}", problem, remedy) from error
    except Exception as error:
        here = _here(info, whereabouts)
        if (lost := as_lost_ranks(error, here, patience)) is not None:
            raise lost from error
        said = one_line(f"{here}: {type(error).__name__}: {error}")
        error.add_note(f"mlperf_bert: error: {said}")
        raise


def as_lost_ranks(error: Exception, here: str, timeout: timedelta) -> LostRanksError | None:
    """An error of communication in one line, where gloo and NCCL say many; None of any other.

    Args:
        error: as raised out of a collective, or of a backward that holds one.
        here: which rank this is, and what it was doing.
        timeout: how long the others had.
    """
    text = str(error).lower()
    is_of_torch = isinstance(error, dist.DistError) and not any(w in text for w in _OF_THIS_HOST)
    if not is_of_torch and not any(word in text for word in _OF_GLOO):
        return None
    if any(word in text for word in _SILENCE):
        seconds = timeout.total_seconds()
        problem = f"no answer from other ranks within {seconds:g} s (run.hang_timeout_s)"
        remedy = "look for a rank that is slow or gone, and for a broken link between the nodes"
        return LostRanksError(here, problem, remedy)
    problem = "another rank closed the connection"
    return LostRanksError(here, problem, "look above and below for the first rank that failed")


def watching(
    info: RankInfo, whereabouts: Whereabouts, patience: timedelta, *, poll_s: float = POLL_S
) -> Watch:
    """A context that ends the process, in one line, where the calling thread goes on no more.

    That is, after `patience` without a new word in `whereabouts`; what may take long is left out.
    """
    thread = threading.get_ident()
    timeout_s = patience.total_seconds()

    def say(sign: int, silent_s: float) -> bool:
        frame = _telling_frame(thread)
        remedy = "look for storage or a device that does not answer"
        if _waits_for_others(frame) or _has_failed(thread):
            if silent_s < timeout_s + 2 * GRACE.total_seconds():
                return False  # the error of a collective knows more, and so does another rank
            remedy = "look for a rank that is slow or gone, or a device that does not answer"
        end_process(
            f"{_here(info, whereabouts)}: no progress for {timeout_s:g} s (run.hang_timeout_s), "
            f"{_place(frame)}; {remedy}"
        )
        return True

    return Watch(whereabouts.sign_of_life, timeout_s, say, poll_s=poll_s)


def _here(info: RankInfo, whereabouts: Whereabouts | None) -> str:
    rank = f"rank {info.rank} on {host_name()}"
    return rank if whereabouts is None else f"{rank}, {whereabouts.in_words}"


def _telling_frame(thread: int) -> FrameType:
    """What `thread`, which trains, is at; the loader's thread where it waits for that one."""
    frames = sys._current_frames()
    own = frames[thread]
    waits_for_loader = _module(own) == "threading" and _passes_through(own, ("loader",))
    if waits_for_loader and not _has_failed(thread):
        for other in threading.enumerate():
            if other.name == "loader" and other.ident in frames:
                return frames[other.ident]
    return own


def _waits_for_others(frame: FrameType) -> bool:
    """Whether a thread that is there waits for other ranks.

    Over NCCL the host does wherever it needs a number from the device, or room in its queue. A
    wait for the own reader process does not count: nobody knows better than this rank.
    """
    if _waits_for(frame) == "ranks":
        return True
    if not _over_nccl():
        return False
    # Who reads waits for storage; but for the device where it brings batches there.
    return not _passes_through(frame, _READING) or _passes_through(frame, ("device",))


def _has_failed(thread: int) -> bool:
    """Whether an error, as of ranks that are gone, is on its way out of it and will say more."""
    raised: object = sys._current_exceptions().get(thread)
    return raised not in (None, (None, None, None))  # a tuple before Python 3.12


def _over_nccl() -> bool:
    return dist.is_initialized() and dist.get_backend() == "nccl"


def _passes_through(innermost: FrameType, waits: tuple[Waits, ...]) -> bool:
    return any(_waits_for(frame) in waits for frame in _outward(innermost))


def _waits_for(frame: FrameType) -> str | None:
    """What a frame's module waits for, where it is one that waits."""
    if _module(frame).startswith(("torch.distributed", "torch.autograd", f"{__package__}.")):
        return "ranks"
    waits: str | None = frame.f_globals.get("WAITS_FOR")
    return waits


def _place(innermost: FrameType) -> str:
    """The innermost place of this package that a thread is at."""
    for frame in _outward(innermost):
        if _module(frame).startswith(_OURS):
            return f"in {_module(frame)}, line {frame.f_lineno}"
    return f"in {_module(innermost)}"


def _outward(innermost: FrameType) -> Iterator[FrameType]:
    """A frame, its caller, and so on."""
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
