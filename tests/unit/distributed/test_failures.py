"""A failure or a hang names its rank, its host and what the rank did; lost ranks are one line."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import contextmanager
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
from mlperf_bert.errors import LOST, DataError, LostRanksError, say_error
from support import run_process

INFO = RankInfo(1, 4, 1, 2, 0, "slurm")
PATIENCE = timedelta(seconds=20)
HERE = f"rank 1 on {host_name()}, step 37"


def at_step_37():
    whereabouts = Whereabouts()
    whereabouts.at("step", 37)
    return whereabouts


def test_bad_data_in_a_step_names_the_rank():
    with pytest.raises(DataError) as caught, naming_failures(INFO, at_step_37(), PATIENCE):
        raise DataError("train.hdf5", "sample 49 is damaged", "prepare it again")
    assert str(caught.value) == f"{HERE}: train.hdf5: sample 49 is damaged; prepare it again"


@pytest.mark.parametrize("whereabouts", [None, Whereabouts()], ids=["nobody knows", "start-up"])
def test_a_mistake_in_start_up_is_no_ranks_failure(whereabouts):
    with (
        pytest.raises(DataError, match=r"^train.hdf5: is missing; make it$"),
        naming_failures(INFO, whereabouts, PATIENCE),
    ):
        raise DataError("train.hdf5", "is missing", "make it")


def test_a_fault_ends_its_traceback_with_the_rank():
    with pytest.raises(ValueError) as caught, naming_failures(INFO, at_step_37(), PATIENCE):
        raise ValueError("no such\nshape")
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert lines[-1] == f"mlperf_bert: error: {HERE}: ValueError: no such\\nshape"


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

    @contextmanager
    def closing():
        try:
            yield
        finally:
            seen.append(capsys.readouterr().err)

    with (
        pytest.raises(type(error)) as caught,
        naming_failures(INFO, at_step_37(), PATIENCE),
        closing(),
        saying_failures(INFO, at_step_37(), PATIENCE),
    ):
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


@pytest.mark.parametrize(
    ("whereabouts", "here"),
    [(at_step_37(), HERE), (Whereabouts(), f"rank 1 on {host_name()}, start-up")],
)
def test_lost_ranks_are_named_always(whereabouts, here):
    with pytest.raises(LostRanksError) as caught, naming_failures(INFO, whereabouts, PATIENCE):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert str(caught.value).startswith(f"{here}: another rank closed the connection; look above")


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


def watched(whereabouts, wait):
    """Too long for what waits for itself, not for what waits for other ranks."""
    with watchdog(INFO, whereabouts, timedelta(seconds=0.2), poll_s=0.05):
        wait(0.6)


@pytest.mark.parametrize(
    ("module", "doing", "hangs"),
    [
        ("mlperf_bert.data.shards", "batch", True),
        ("mlperf_bert.data.mpi_readers", "batch", True),
        ("mlperf_bert.data.loader", "batch", False),  # another rank may be the cause
        ("torch.distributed.distributed_c10d", "step", False),  # the time-out of gloo is to come
        ("mlperf_bert.distributed.flat_reducer", "step", False),
        ("mlperf_bert.data.shards", "start-up", False),
        ("mlperf_bert.data.shards", "checkpoint", False),
    ],
)
def test_a_loop_that_goes_on_no_more_is_named(module, doing, hangs, said):
    whereabouts = Whereabouts()
    whereabouts.at(doing, 38)
    watched(whereabouts, function_of(module))
    line = (
        f"mlperf_bert: error: rank 1 on {host_name()}, {whereabouts.in_words}: no progress for "
        "0.2 s (run.hang_timeout_s); look for a rank that is gone, and for storage or a device "
        "that hangs\n"
    )
    assert said() == (line if hangs else "")


@pytest.mark.parametrize(
    ("module", "hangs"),
    [
        ("mlperf_bert.data.shards", True),
        ("mlperf_bert.data.mpi_readers", True),
        ("mlperf_bert.data.exchange", False),
    ],
)
def test_who_waits_for_the_loader_is_where_its_thread_is(module, hangs, said):
    thread = threading.Thread(target=function_of(module), args=(0.7,), name="loader")
    thread.start()
    watched(at_step_37(), time.sleep)
    thread.join()
    assert (said() != "") == hangs


def test_who_waits_for_others_ends_when_they_did_not(said, monkeypatch):
    monkeypatch.setattr(failures, "GRACE", timedelta(seconds=0.05))
    watched(at_step_37(), function_of("mlperf_bert.data.exchange"))
    assert "look for a rank that is gone" in said()


def test_steps_are_progress(said):
    whereabouts = Whereabouts()
    with watchdog(INFO, whereabouts, timedelta(seconds=0.4), poll_s=0.02):
        for step in range(40):
            whereabouts.at("step", step)
            time.sleep(0.02)
    assert said() == ""


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
"""


def test_a_rank_that_hangs_ends_with_one_line_and_its_status():
    ended = run_process(sys.executable, "-c", f"{PROGRAM}    time.sleep(60)\n")
    assert ended.returncode == LOST
    assert ended.stderr.count("\n") == 1
    assert f"rank 0 on {host_name()}, step 39: no progress for 0.5 s" in ended.stderr


def test_a_process_that_was_stopped_and_goes_on_has_not_hung():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=50)
    assert (process.returncode, errors) == (0, "")


# As torch 2.13 raises them, in one line each.
CLOSED = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"
SILENT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation"
AFTER = "Application timeout caused pair closure"
TAKEN = "The server socket has failed to listen: address already in use"
NO_ANSWER = "no answer from other ranks within 20 s (run.hang_timeout_s)"


@pytest.mark.parametrize(
    ("raised", "problem"),
    [
        (RuntimeError(CLOSED), "another rank closed the connection"),
        (RuntimeError(SILENT), NO_ANSWER),
        (RuntimeError(AFTER), NO_ANSWER),
        (RuntimeError("shapes differ; timed out"), None),
        (dist.DistNetworkError(TAKEN), None),
    ],
)
def test_communication_is_told_by_its_words(raised, problem):
    error = as_lost_ranks(raised, HERE, PATIENCE)
    if problem is None:
        assert error is None
        return
    assert error is not None and error.exit_status == 70
    assert str(error).startswith(f"{HERE}: {problem}; ")


def test_a_slurm_node_has_its_own_name():
    assert host_name({"SLURMD_NODENAME": "n2"}) == "n2"
    assert host_name({}) != ""
