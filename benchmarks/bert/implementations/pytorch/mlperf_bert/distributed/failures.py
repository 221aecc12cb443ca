"""Error messages that name a failed or hanging rank, its host and what it was doing."""

import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Self

import torch.distributed as dist

from mlperf_bert.distributed.launch import RankInfo, host_name
from mlperf_bert.distributed.whereabouts import Whereabouts
from mlperf_bert.errors import (
    LOST,
    LostRanksError,
    UserError,
    is_out_of_memory,
    one_line,
    say_error,
)

# A rank that hangs by itself reports it before the ranks that wait for it give up and have it
# killed; so waiting ranks get more time, first in their collectives.
GRACE = timedelta(seconds=2)
POLL_S = 0.5
# Modules whose functions wait for other ranks, and those that read samples.
_COLLECTIVES = (
    "torch.distributed",
    "torch.autograd",
    f"{__package__}.",
    "mlperf_bert.data.exchange",
)
_READING = ("mlperf_bert.data.shards", "mlperf_bert.data.mpi_readers")
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
) -> Iterator[None]:
    """`naming_failures` that says an error in one line before any context around it is left.

    What is left then may take seconds, and a launcher may end the process meanwhile. The traceback
    of an error of ours follows at the end of the process, where errors of files and of memory have
    their own words (__main__.py). An error that all ranks raise together is said by rank 0.
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


class Watchdog:
    """A context that ends the process with one line and status 70 once this rank does nothing new.

    The training thread enters it. That thread cannot be asked to leave while it waits for a disk or
    a device, so another one looks at the progress. NCCL's own watchdog cannot see what a graph
    replays, but sooner or later the host waits for the numbers of the step that hangs. Activities
    that may take long have no limit. Looks are counted, not time: a process that was stopped and
    continued (SIGSTOP, SIGCONT) did not look meanwhile, and has not hung.

    Args:
        info: this rank.
        whereabouts: what it is doing.
        patience: time without progress after which it hangs.
        poll_s: seconds between two looks.
    """

    def __init__(
        self,
        info: RankInfo,
        whereabouts: Whereabouts,
        patience: timedelta,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._info = info
        self._whereabouts = whereabouts
        self._patience = patience
        self._poll_s = poll_s
        self._training = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        looks_if_alone = math.ceil(self._patience.total_seconds() / self._poll_s)
        looks_at_most = looks_if_alone + math.ceil(2 * GRACE.total_seconds() / self._poll_s)
        last, looks = None, 0
        while not self._over.wait(self._poll_s):
            progress = self._whereabouts.progress
            looks = looks + 1 if progress == last else 0
            last = progress
            if progress is None or looks < looks_if_alone:
                continue
            # A collective's error, or another rank, knows more.
            knows_less = _waits_for_others() or _has_failed(self._training)
            if looks >= looks_at_most or not knows_less:
                self._end()
                return

    def _end(self) -> None:
        seconds = self._patience.total_seconds()
        problem = f"no progress for {seconds:g} s (run.hang_timeout_s)"
        remedy = "look for a rank that is gone, and for storage or a device that does not answer"
        say_error(f"{_here(self._info, self._whereabouts)}: {problem}; {remedy}")
        os._exit(LOST)


def _note(info: RankInfo, whereabouts: Whereabouts | None, error: Exception) -> str:
    return one_line(f"{_here(info, whereabouts)}: {type(error).__name__}: {error}")


def _here(info: RankInfo, whereabouts: Whereabouts | None) -> str:
    rank = f"rank {info.rank} on {host_name()}"
    return rank if whereabouts is None else f"{rank}, {whereabouts.in_words}"


def _waits_for_others() -> bool:
    """True if a thread of this process is in a collective: another rank knows more.

    Over NCCL the host waits for other ranks wherever it needs a number from the device, or room in
    its queue; so it waits for them unless it reads.
    """
    watchdog, frames = threading.get_ident(), sys._current_frames()
    stacks = [_modules(frame) for thread, frame in frames.items() if thread != watchdog]
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return not any(module in _READING for modules in stacks for module in modules)
    return any(modules[0].startswith(_COLLECTIVES) for modules in stacks)


def _has_failed(thread: int) -> bool:
    """True if the thread is raising an error, such as lost ranks, which will say more."""
    raised: object = sys._current_exceptions().get(thread)
    return raised not in (None, (None, None, None))  # a tuple before Python 3.12


def _modules(innermost: FrameType) -> list[str]:
    """The modules of a frame, of its caller, and so on."""
    modules = []
    frame: FrameType | None = innermost
    while frame is not None:
        modules.append(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    return modules
