"""A failure or a hang names its rank, its host and what the rank did; lost ranks are one line."""

import os
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module

import pytest
import torch.distributed as dist

from mlperf_bert.distributed import failures
from mlperf_bert.distributed.failures import (
    as_lost_ranks,
    naming_failures,
    saying_failures,
    watchdog,
)
from mlperf_bert.distributed.launch import RankInfo, host_name
from mlperf_bert.distributed.signal_watch import Whereabouts
from mlperf_bert.errors import LOST, DataError, UserError, say_error

INFO = RankInfo(1, 4, 1, 2, 0, "slurm")
PATIENCE = timedelta(seconds=20)
SHORT = timedelta(seconds=0.2)
HERE = f"rank 1 on {host_name()}, step 37"
START_UP = f"rank 1 on {host_name()}, start-up"


def at_step_37():
    whereabouts = Whereabouts()
    whereabouts.at("step", 37)
    return whereabouts


# As torch 2.13 raises them, in one line.
CLOSED = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"
TAKEN = "The server socket has failed to listen: address already in use"
LOST_ONE = (
    "another rank closed the connection; "
    "look for the first rank that failed, in the lines above and below"
)


@pytest.mark.parametrize(
    ("raised", "whereabouts", "last_line"),
    [
        (("a", "is bad", "mend it"), at_step_37(), f"DataError: {HERE}: a: is bad; mend it"),
        (("a", "is missing", "make it"), Whereabouts(), "DataError: a: is missing; make it"),
        (("a", "is missing", "make it"), None, "DataError: a: is missing; make it"),
        (ValueError("a\nb"), at_step_37(), f"mlperf_bert: error: {HERE}: ValueError: a\\nb"),
        (RuntimeError(CLOSED), at_step_37(), f"LostRanksError: {HERE}: {LOST_ONE}"),
        (RuntimeError(CLOSED), Whereabouts(), f"LostRanksError: {START_UP}: {LOST_ONE}"),
    ],
)
def test_an_error_ends_its_traceback_with_the_rank(raised, whereabouts, last_line):
    """But for mistakes in start-up, which all ranks raise together."""
    error = DataError(*raised) if isinstance(raised, tuple) else raised
    with (
        pytest.raises((UserError, ValueError)) as caught,
        naming_failures(INFO, whereabouts, PATIENCE),
    ):
        raise error
    shown = "".join(traceback.format_exception(caught.value)).splitlines()[-1]
    assert shown.removeprefix("mlperf_bert.errors.") == last_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no such shape"), f"{HERE}: ValueError: no such shape"),
        (DataError("a", "is damaged", "mend it"), f"{HERE}: a: is damaged; mend it"),
        (OSError(28, "No space left on device"), None),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), None),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_error_is_said_once_and_before_anything_is_closed(capsys, error, said):
    seen = []
    with (
        pytest.raises(type(error)) as caught,
        naming_failures(INFO, at_step_37(), PATIENCE),
        ExitStack() as closing,
        saying_failures(INFO, at_step_37(), PATIENCE),
    ):
        closing.callback(lambda: seen.append(capsys.readouterr().err))
        raise error
    assert seen == ["" if said is None else f"mlperf_bert: error: {said}\n"]
    say_error(caught.value if isinstance(caught.value, DataError) else "")  # as __main__ does
    assert said is None or said not in capsys.readouterr().err
    shown = "".join(traceback.format_exception(caught.value))
    assert ("mlperf_bert: error:" in shown) == (said is None)


def test_an_error_of_all_ranks_is_said_by_rank_zero(capsys):
    for rank in (0, 1):
        error = DataError("a", "is damaged", "mend it")
        error.is_of_all_ranks = True
        info = RankInfo(rank, 4, rank, 2, 0, "slurm")
        with pytest.raises(DataError) as caught, saying_failures(info, at_step_37(), PATIENCE):
            raise error
        say_error(caught.value)
        said = f"mlperf_bert: error: rank 0 on {host_name()}, step 37: a: is damaged; mend it\n"
        assert capsys.readouterr().err == ("" if rank else said)


@pytest.fixture
def said(monkeypatch, capsys):
    """What watchdogs printed; they end their thread instead of this process."""
    monkeypatch.setattr(os, "_exit", lambda status: None)
    return lambda: capsys.readouterr().err


def function_of(module):
    """One that waits, as if it were written in that module."""
    names = {"__name__": import_module(module).__name__, "sleep": time.sleep}
    exec("def wait(seconds): sleep(seconds)", names)
    return names["wait"]


@pytest.mark.parametrize(
    ("module", "doing", "in_thread", "hangs"),
    [
        ("mlperf_bert.data.shards", "batch", False, True),
        ("mlperf_bert.data.mpi_readers", "batch", False, True),
        ("mlperf_bert.data.shards", "batch", True, True),  # who waits for the loader
        ("mlperf_bert.data.exchange", "batch", True, False),  # another rank may be the cause
        ("torch.distributed.distributed_c10d", "step", False, False),  # gloo's time-out is to come
        ("mlperf_bert.data.shards", "start-up", False, False),
        ("mlperf_bert.data.shards", "checkpoint", False, False),
    ],
)
def test_a_loop_that_goes_on_no_more_is_named(module, doing, in_thread, hangs, said, monkeypatch):
    """Too long for what waits for itself, and later for what waits for other ranks."""
    whereabouts = Whereabouts()
    whereabouts.at(doing, 38)
    with ThreadPoolExecutor() as loader, watchdog(INFO, whereabouts, SHORT, poll_s=0.05):
        if in_thread:
            loader.submit(function_of(module), 0.7)
        (time.sleep if in_thread else function_of(module))(0.6)
    line = (
        f"mlperf_bert: error: rank 1 on {host_name()}, {whereabouts.in_words}: the rank made no "
        "progress for 0.2 s (run.hang_timeout_s); look for a rank that has died, and for storage "
        "or a device that hangs\n"
    )
    assert said() == (line if hangs else "")
    if doing == "step":  # who waits for others ends when they did not
        monkeypatch.setattr(failures, "GRACE", timedelta(seconds=0.05))
        with watchdog(INFO, whereabouts, SHORT, poll_s=0.05):
            function_of(module)(0.6)
        assert said() == line


PROGRAM = """
import time
from datetime import timedelta
from mlperf_bert.distributed import failures
from mlperf_bert.distributed.failures import watchdog
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.signal_watch import Whereabouts
failures.GRACE = timedelta(0)
whereabouts = Whereabouts()
with watchdog(RankInfo(0, 1, 0, 1, 0, "single"), whereabouts, timedelta(seconds=0.5), poll_s=0.05):
    print("begun", flush=True)
    for step in range(40):
        whereabouts.at("step", step)
        time.sleep(0.02)
    print("went on", flush=True)
    time.sleep(60)
"""


def test_a_process_that_was_stopped_has_not_hung_and_one_that_hangs_ends_with_one_line():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    output, errors = process.communicate(timeout=50)
    assert (process.returncode, output) == (LOST, "went on\n")
    assert errors.count("\n") == 1
    assert f"rank 0 on {host_name()}, step 39: the rank made no progress for 0.5 s" in errors


def test_other_errors_of_torch_are_no_lost_ranks():
    for other in (RuntimeError("shapes differ; timed out"), dist.DistNetworkError(TAKEN)):
        assert as_lost_ranks(other, HERE, PATIENCE) is None


def test_a_slurm_node_has_its_own_name():
    assert host_name({"SLURMD_NODENAME": "n2"}) == "n2"
    assert host_name({}) != ""
