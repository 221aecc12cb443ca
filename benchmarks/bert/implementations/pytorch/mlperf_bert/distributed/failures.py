"""Error messages that name a failed or hanging rank, its host, and its current activity."""

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

# A rank that hangs in a read must report it before the ranks that wait for it give up, because the
# launcher kills it when they exit. Ranks that wait in a collective therefore get this much more
# time.
GRACE = timedelta(seconds=2)
POLL_S = 0.5
# Modules whose functions read samples.
_READING = ("mlperf_bert.data.shards", "mlperf_bert.data.mpi_readers")
# Words in gloo's errors (torch 2.11 to 2.13), which are plain RuntimeErrors.
_OF_GLOO = ("gloo/transport", "caused pair closure")
# The time that passed, as in "timed out waiting 600000ms for recv", "ran for 600043 milliseconds".
_WAITED = re.compile(r"\b(\d+) ?(ms|milliseconds|seconds)\b")
_OUR_TIMEOUT = "application timeout"  # gloo's words after the timeout of another operation
# Words of the operating system or gloo about a network that does not work.
_CAUSE = re.compile(
    "connection timed out|operation timed out|network is unreachable|no route to host"
    r"|cannot assign requested address|host is down|unable to (?:find|resolve)[^\[\n]*"
)
_OF_THIS_HOST = ("failed to listen", "already in use")


@contextmanager
def naming_failures(
    info: RankInfo, whereabouts: Whereabouts | None, patience: timedelta
) -> Iterator[None]:
    """Add this rank, its host and its activity to every error that the `with` block raises.

    A UserError gets the rank at the front of its message. During start-up the message stays as it
    is, because all ranks raise the same error together. A communication error that is due to lost
    ranks becomes a LostRanksError. Any other exception gets a note, which Python prints as the last
    line of its traceback.

    Args:
        info: this rank.
        whereabouts: the current activity of this rank, or None if it is not recorded.
        patience: how long this rank waits for an answer from the others.
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
    """Add the rank to errors as `naming_failures` does, and print each error in one line at once.

    The line must not wait until the outer contexts have exited, because that may take seconds, and
    a launcher may kill the process meanwhile. The traceback of a bug is printed when the process
    exits. OSErrors and out-of-memory errors are also printed when the process exits, because
    __main__.py adds a remedy to them. If all ranks raise the same error together, only rank 0
    prints it.
    """
    try:
        with naming_failures(info, whereabouts, patience):
            yield
    except Exception as error:
        if isinstance(error, OSError) or is_out_of_memory(error):
            raise
        line = str(error)
        if not isinstance(error, UserError):
            line = _note(info, whereabouts, error)
            error.__notes__.pop()  # the same line, which would be printed twice
        if info.rank == 0 or not getattr(error, "is_of_all_ranks", False):
            say_error(line)
        error.is_said = True  # type: ignore[attr-defined]
        raise


def as_lost_ranks(error: Exception, here: str, timeout: timedelta) -> LostRanksError | None:
    """Convert a communication error of gloo or NCCL to a LostRanksError with a one-line message.

    Returns None if the error has another cause.

    Args:
        error: an error from a collective, or from a backward pass that contains a collective.
        here: this rank and its activity, in words.
        timeout: how long this rank waited for an answer from the others.
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
    cause, how_long = _CAUSE.search(text), "in time"
    if waited:
        seconds = min(max(waited), patience)  # collectives wait for GRACE longer
        how_long = f"within {seconds:g} s (run.hang_timeout_s)"
    if waited or (cause is None and re.search("timed? ?out", text)):
        remedy = "look for a rank that is slow or has died, and for a broken link between the nodes"
        return LostRanksError(here, f"other ranks did not answer {how_long}", remedy)
    problem = "another rank closed the connection"
    remedy = "look for the first rank that failed, in the lines above and below"
    if cause is not None:
        problem = f"the network connection to another rank failed ({cause[0]})"
        remedy = "check GLOO_SOCKET_IFNAME, and the links and MTUs of all nodes"
    return LostRanksError(here, problem, remedy)


@contextmanager
def watchdog(
    info: RankInfo, whereabouts: Whereabouts, patience: timedelta, *, poll_s: float = POLL_S
) -> Iterator[None]:
    """End the process with a one-line error and status 70 if this rank makes no progress.

    The training thread cannot end itself while it waits for a disk or a device, so another thread
    checks its progress. If any thread of this rank is reading samples, the rank probably waits for
    its own disk or its reader process, and the watchdog ends the process after `patience`.
    Otherwise, the rank may be waiting for another rank that will report the cause, so the watchdog
    waits a few seconds longer. Activities that may take long, such as writing a checkpoint, have no
    limit.

    The watchdog counts checks instead of seconds. A process that was stopped and continued
    (SIGSTOP, SIGCONT) has not hung, and it makes no checks while it is stopped.

    Args:
        info: this rank.
        whereabouts: the current activity of this rank.
        patience: the longest time that a rank may spend without progress.
        poll_s: seconds between two checks.
    """
    checks_if_reading = math.ceil(patience.total_seconds() / poll_s)
    most_checks = checks_if_reading + math.ceil(2 * GRACE.total_seconds() / poll_s)
    over = threading.Event()

    def watch() -> None:
        last, checks = None, 0
        while not over.wait(poll_s):
            progress = whereabouts.progress
            checks = checks + 1 if progress == last else 0
            last = progress
            if progress is None or checks < checks_if_reading:
                continue
            if checks >= most_checks or _is_reading():
                seconds = f"{patience.total_seconds():g} s (run.hang_timeout_s)"
                problem = f"the rank made no progress for {seconds}"
                remedy = "look for a rank that has died, and for storage or a device that hangs"
                say_error(f"{_here(info, whereabouts)}: {problem}; {remedy}")
                os._exit(LOST)
                return  # reached only in a test that replaces `os._exit`

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _note(info: RankInfo, whereabouts: Whereabouts | None, error: Exception) -> str:
    """Describe an error in one line, with the rank, its activity, and the error's type."""
    return one_line(f"{_here(info, whereabouts)}: {type(error).__name__}: {error}")


def _here(info: RankInfo, whereabouts: Whereabouts | None) -> str:
    """Return the rank, its host and, if `whereabouts` is given, its activity in words."""
    rank = f"rank {info.rank} on {host_name()}"
    return rank if whereabouts is None else f"{rank}, {whereabouts.in_words}"


def _is_reading() -> bool:
    """Return True if a thread of this process is reading samples."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_globals.get("__name__") in _READING:
                return True
            frame = frame.f_back
    return False
