"""Error messages that name a failed or hanging rank, its host and what it was doing."""

import math
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from mlperf_bert.distributed.launch import RankInfo, host_name
from mlperf_bert.distributed.signal_watch import Whereabouts
from mlperf_bert.errors import (
    LOST,
    LostRanksError,
    UserError,
    is_out_of_memory,
    one_line,
    say_error,
)

# A rank that hangs in a read reports it before the ranks that wait for it give up and have it
# killed; so waiting ranks get more time, first in their collectives.
GRACE = timedelta(seconds=2)
POLL_S = 0.5
# Modules whose functions read samples.
_READING = ("mlperf_bert.data.shards", "mlperf_bert.data.mpi_readers")
# Words in gloo's RuntimeErrors (torch 2.11 to 2.13), which have no type of their own.
_OF_GLOO = ("gloo/transport", "caused pair closure")
# A time that has passed: "timed out waiting 600000ms for recv", "ran for 600043 milliseconds".
_WAITED = re.compile(r"\b(\d+) ?(ms|milliseconds|seconds)\b")
_OUR_TIMEOUT = "application timeout"  # of gloo, after another operation's has passed
# What the operating system or gloo says of a network that does not work.
_CAUSE = re.compile(
    "connection timed out|operation timed out|network is unreachable|no route to host"
    r"|cannot assign requested address|host is down|unable to (?:find|resolve)[^\[\n]*"
)
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
    patience = timeout.total_seconds()
    waited = [
        float(number) / (1000 if unit.startswith("m") else 1)
        for number, unit in _WAITED.findall(text)
    ]
    waited += [patience] * (_OUR_TIMEOUT in text)
    if waited:
        seconds = min(max(waited), patience)  # collectives wait GRACE longer
        problem = f"no answer from other ranks within {seconds:g} s (run.hang_timeout_s)"
        remedy = "look for a rank that is slow or gone, and for a broken link between the nodes"
        return LostRanksError(here, problem, remedy)
    if (cause := _CAUSE.search(text)) is None and re.search("timed? ?out", text):
        problem = "no answer from other ranks in time"
        return LostRanksError(here, problem, "look for a rank that is slow or gone")
    if cause is not None:
        problem = f"the network gave up on another rank ({cause[0]})"
        remedy = "look for a broken link between the nodes, one that loses large packets (compare "
        remedy += "their MTU), and for the right GLOO_SOCKET_IFNAME"
        return LostRanksError(here, problem, remedy)
    problem = "another rank closed the connection"
    return LostRanksError(here, problem, "look above and below for the first rank that failed")


@contextmanager
def watchdog(
    info: RankInfo, whereabouts: Whereabouts, patience: timedelta, *, poll_s: float = POLL_S
) -> Iterator[None]:
    """End the process with one line and status 70 once this rank does nothing new.

    The training thread cannot be asked to leave while it waits for a disk or a device, so another
    one looks at its progress. A rank of which any thread reads samples probably waits for its own
    disk, or for its reader process, and is ended once `patience` has passed. Any other may wait for
    ranks that know more, and gets a few seconds more.
    Activities that may take long have no limit. Looks are counted, not time: a process that was
    stopped and continued (SIGSTOP, SIGCONT) did not look meanwhile, and has not hung.

    Args:
        info: this rank.
        whereabouts: what it is doing.
        patience: time without progress after which it hangs.
        poll_s: seconds between two looks.
    """
    looks_if_alone = math.ceil(patience.total_seconds() / poll_s)
    looks_at_most = looks_if_alone + math.ceil(2 * GRACE.total_seconds() / poll_s)
    over = threading.Event()

    def watch() -> None:
        last, looks = None, 0
        while not over.wait(poll_s):
            progress = whereabouts.progress
            looks = looks + 1 if progress == last else 0
            last = progress
            if progress is None or looks < looks_if_alone:
                continue
            if looks >= looks_at_most or _reads():
                problem = f"no progress for {patience.total_seconds():g} s (run.hang_timeout_s)"
                remedy = "look for a rank that is gone, and for storage or a device that hangs"
                say_error(f"{_here(info, whereabouts)}: {problem}; {remedy}")
                os._exit(LOST)
                return  # where a test keeps the process

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _note(info: RankInfo, whereabouts: Whereabouts | None, error: Exception) -> str:
    return one_line(f"{_here(info, whereabouts)}: {type(error).__name__}: {error}")


def _here(info: RankInfo, whereabouts: Whereabouts | None) -> str:
    rank = f"rank {info.rank} on {host_name()}"
    return rank if whereabouts is None else f"{rank}, {whereabouts.in_words}"


def _reads() -> bool:
    """True if a thread of this process reads samples."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_globals.get("__name__") in _READING:
                return True
            frame = frame.f_back
    return False
