"""Error messages that name a failed or hanging rank, its host and what it was doing."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Literal

import torch.distributed as dist

from mlperf_bert.common.errors import (
    LostRanksError,
    UserError,
    is_out_of_memory,
    one_line,
    say_error,
)
from mlperf_bert.distributed.launch import RankInfo, host_name
from mlperf_bert.signals.whereabouts import POLL_S, Watch, Whereabouts, end_process

# A rank that hangs by itself reports it before the ranks that wait for it give up and have it
# killed; so waiting ranks get more time, first in their collectives.
GRACE = timedelta(seconds=2)
# A module names what it waits for in its constant `WAITS_FOR`.
Waits = Literal["ranks", "loader", "storage", "device"]
_READING: tuple[Waits, ...] = ("loader", "storage")
_OURS = __name__.partition(".")[0] + "."
# Words in gloo's RuntimeErrors (torch 2.11 to 2.13), which have no type of their own.
_OF_GLOO = ("gloo/transport", "caused pair closure")
_SILENCE = ("timed out", "timeout")
_OF_THIS_HOST = ("failed to listen", "already in use")


@contextmanager
def naming_failures(
    info: RankInfo, whereabouts: Whereabouts | None, patience: timedelta
) -> Iterator[None]:
    """Add the rank to every error of the body.

    A UserError gets it at its beginning, except in start-up, where all ranks raise the same mistake
    together. An error caused by lost ranks becomes a LostRanksError. Any other exception gets a
    note, which is the last line of its traceback.

    Args:
        info: this rank.
        whereabouts: what it is doing; None if that is not recorded.
        patience: time that other ranks have to answer.
    """
    try:
        yield
    except UserError as error:
        if error.is_said or whereabouts is None or whereabouts.in_start_up:
            raise
        where, problem, remedy = error.args
        named = type(error)(f"{_here(info, whereabouts)}: {where}", problem, remedy)
        named.is_of_all_ranks = error.is_of_all_ranks
        raise named from error
    except Exception as error:
        if getattr(error, "is_said", False):
            raise
        here = _here(info, whereabouts)
        if (lost := as_lost_ranks(error, here, patience)) is not None:
            raise lost from error
        error.add_note(f"mlperf_bert: error: {_note(info, whereabouts, error)}")
        raise


@contextmanager
def saying_failures(
    info: RankInfo,
    whereabouts: Whereabouts,
    patience: timedelta,
    clear: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """`naming_failures` that says an error in one line before any context around it is left.

    What is left then may take seconds, and a launcher may end the process meanwhile. The traceback
    of an error of ours follows at the end of the process, where errors of files and of memory have
    their own words (__main__.py). An error that all ranks raise together is said by rank 0. `clear`
    is called first: it ends a line that is shown in place.
    """
    try:
        with naming_failures(info, whereabouts, patience):
            yield
    except Exception as error:
        if isinstance(error, OSError) or is_out_of_memory(error):
            raise
        said = str(error)
        if not isinstance(error, UserError):
            said = _note(info, whereabouts, error)
            error.__notes__.pop()  # says the same
        clear()
        if info.rank == 0 or not getattr(error, "is_of_all_ranks", False):
            say_error(said)
        error.is_said = True  # type: ignore[attr-defined]
        raise


def as_lost_ranks(error: Exception, here: str, timeout: timedelta) -> LostRanksError | None:
    """A communication error in one line, where gloo and NCCL print many; None for any other error.

    Args:
        error: raised by a collective, or by a backward that contains one.
        here: this rank, and what it was doing.
        timeout: time that the others had.
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
    """A context that ends the process, with one line, once the calling thread hangs.

    It hangs after `patience` without a change in `whereabouts`; phases that may take long do not
    count.
    """
    thread = threading.get_ident()
    timeout_s = patience.total_seconds()

    def say(sign: int, silent_s: float) -> bool:
        frame = _telling_frame(thread)
        remedy = "look for storage or a device that does not answer"
        if _waits_for_others(frame) or _has_failed(thread):
            if silent_s < timeout_s + 2 * GRACE.total_seconds():
                return False  # a collective's error, or another rank, knows more
            remedy = "look for a rank that is slow or gone, or a device that does not answer"
        end_process(
            f"{_here(info, whereabouts)}: no progress for {timeout_s:g} s (run.hang_timeout_s), "
            f"{_place(frame)}; {remedy}"
        )
        return True

    return Watch(whereabouts.sign_of_life, timeout_s, say, poll_s=poll_s)


def _note(info: RankInfo, whereabouts: Whereabouts | None, error: Exception) -> str:
    return one_line(f"{_here(info, whereabouts)}: {type(error).__name__}: {error}")


def _here(info: RankInfo, whereabouts: Whereabouts | None) -> str:
    rank = f"rank {info.rank} on {host_name()}"
    return rank if whereabouts is None else f"{rank}, {whereabouts.in_words}"


def _telling_frame(thread: int) -> FrameType:
    """The current frame of the training `thread`; the loader thread's if it waits for that."""
    frames = sys._current_frames()
    own = frames[thread]
    waits_for_loader = _module(own) == "threading" and _passes_through(own, ("loader",))
    if waits_for_loader and not _has_failed(thread):
        for other in threading.enumerate():
            if other.name == "loader" and other.ident in frames:
                return frames[other.ident]
    return own


def _waits_for_others(frame: FrameType) -> bool:
    """True if a thread at this frame waits for other ranks.

    With NCCL the host waits wherever it needs a number from the device, or room in its queue. A
    wait for this rank's own reader process does not count: no other rank knows more.
    """
    if _waits_for(frame) == "ranks":
        return True
    if not _over_nccl():
        return False
    # A reading thread waits for storage, but for the device while it copies batches there.
    return not _passes_through(frame, _READING) or _passes_through(frame, ("device",))


def _has_failed(thread: int) -> bool:
    """True if the thread is raising an error, such as lost ranks, which will say more."""
    raised: object = sys._current_exceptions().get(thread)
    return raised not in (None, (None, None, None))  # a tuple before Python 3.12


def _over_nccl() -> bool:
    return dist.is_initialized() and dist.get_backend() == "nccl"


def _passes_through(innermost: FrameType, waits: tuple[Waits, ...]) -> bool:
    return any(_waits_for(frame) in waits for frame in _outward(innermost))


def _waits_for(frame: FrameType) -> str | None:
    """What the frame's module waits for; None if it does not wait."""
    if _module(frame).startswith(("torch.distributed", "torch.autograd", f"{__package__}.")):
        return "ranks"
    waits: str | None = frame.f_globals.get("WAITS_FOR")
    return waits


def _place(innermost: FrameType) -> str:
    """The innermost place in this package of a thread's stack."""
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
