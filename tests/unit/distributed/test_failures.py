"""A failure or a hang names its rank, its host and what the rank did; lost ranks are one line."""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
import torch.distributed as dist

from mlperf_bert.common.errors import DataError, LostRanksError, say_error
from mlperf_bert.distributed import failures
from mlperf_bert.distributed.failures import (
    as_lost_ranks,
    naming_failures,
    saying_failures,
    watching,
)
from mlperf_bert.distributed.launch import RankInfo, host_name
from mlperf_bert.signals.whereabouts import Whereabouts

INFO = RankInfo(1, 4, 1, 2, 0, "slurm")
PATIENCE = timedelta(seconds=20)
HERE = f"rank 1 on {host_name()}, step 37"


def at_step_37() -> Whereabouts:
    whereabouts = Whereabouts()
    whereabouts.at("step", 37)
    return whereabouts


def test_bad_data_in_a_step_names_the_rank() -> None:
    with pytest.raises(DataError) as caught, naming_failures(INFO, at_step_37(), PATIENCE):
        raise DataError("train.hdf5", "sample 49 is damaged", "prepare it again")
    assert str(caught.value) == f"{HERE}: train.hdf5: sample 49 is damaged; prepare it again"


@pytest.mark.parametrize("whereabouts", [None, Whereabouts()], ids=["nobody knows", "start-up"])
def test_a_mistake_in_start_up_is_no_ranks_failure(whereabouts: Whereabouts | None) -> None:
    with (
        pytest.raises(DataError, match=r"^train.hdf5: is missing; make it$"),
        naming_failures(INFO, whereabouts, PATIENCE),
    ):
        raise DataError("train.hdf5", "is missing", "make it")


def test_a_fault_ends_its_traceback_with_the_rank() -> None:
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
def test_an_error_is_said_once_and_before_anything_is_closed(
    capsys: pytest.CaptureFixture[str], error: Exception, said: str | None
) -> None:
    cleared, seen = [], []

    @contextmanager
    def closing() -> Iterator[None]:
        try:
            yield
        finally:
            seen.append(capsys.readouterr().err)

    with (
        pytest.raises(type(error)) as caught,
        naming_failures(INFO, at_step_37(), PATIENCE),
        closing(),
        saying_failures(INFO, at_step_37(), PATIENCE, lambda: cleared.append(True)),
    ):
        raise error
    assert seen == ["" if said is None else f"mlperf_bert: error: {said}\n"]
    assert len(cleared) == (said is not None)
    say_error(caught.value if isinstance(caught.value, DataError) else "")  # as __main__ does
    assert said is None or said not in capsys.readouterr().err
    shown = "".join(traceback.format_exception(caught.value))
    assert ("mlperf_bert: error:" in shown) == (said is None)


def test_an_error_of_all_ranks_is_said_by_rank_zero(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_lost_ranks_are_named_always(whereabouts: Whereabouts, here: str) -> None:
    with pytest.raises(LostRanksError) as caught, naming_failures(INFO, whereabouts, PATIENCE):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert str(caught.value).startswith(f"{here}: another rank closed the connection; look above")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(failures, "end_process", lines.append)
    return lines


def function_of(
    module: str, inner: Callable[[float], object] = time.sleep, name: str = "wait"
) -> Any:
    """One that calls `inner`, which waits, as if it were written in that module."""
    waits_for = getattr(import_module(module), "WAITS_FOR", None)
    names: dict[str, Any] = {"__name__": module, "WAITS_FOR": waits_for, "inner": inner}
    exec(f"def {name}(seconds): inner(seconds)", names)
    return names[name]


def queued(seconds: float) -> None:
    """As the loop that waits for a batch."""
    with suppress(queue.Empty):
        queue.Queue[None]().get(timeout=seconds)


def watched(whereabouts: Whereabouts, wait: Callable[[float], object]) -> None:
    """Too long for what waits for itself, not for what waits for other ranks."""
    with watching(INFO, whereabouts, timedelta(seconds=0.2), poll_s=0.05):
        wait(0.6)


@pytest.mark.parametrize(
    ("module", "doing", "lines"),
    [
        ("mlperf_bert.data.loader", "batch", 1),
        ("torch.distributed.distributed_c10d", "step", 0),  # the time-out of gloo is to come
        ("mlperf_bert.data.loader", "checkpoint", 0),
    ],
)
def test_a_loop_that_goes_on_no_more_is_named_with_its_place(
    module: str, doing: Any, lines: int, said: list[str]
) -> None:
    whereabouts = Whereabouts()
    whereabouts.at(doing, 38)
    watched(whereabouts, function_of(module))
    assert len(said) == lines
    expected = f"rank 1 on {host_name()}, {whereabouts.in_words}: no progress for 0.2 s "
    for line in said:
        assert line.startswith(expected)
        assert "in mlperf_bert.data.loader, line 1; look for storage" in line


@pytest.mark.parametrize(
    ("module", "inner", "lines"),
    [
        ("mlperf_bert.run.metrics", time.sleep, 0),
        ("mlperf_bert.signals.stop_request", time.sleep, 0),
        ("mlperf_bert.evaluation.batches", queued, 1),  # for its own thread that reads
        ("mlperf_bert.data.loader", function_of("mlperf_bert.data.shards"), 1),
        ("mlperf_bert.data.loader", function_of("mlperf_bert.data.staging"), 0),
    ],
)
def test_over_nccl_other_ranks_are_waited_for_wherever_the_host_wants_a_number(
    module: str,
    inner: Callable[[float], object],
    lines: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failures, "_over_nccl", lambda: True)
    watched(at_step_37(), function_of(module, inner))
    assert len(said) == lines


@pytest.mark.parametrize(
    ("module", "lines"),
    [
        ("mlperf_bert.data.shards", 1),
        ("mlperf_bert.data.mpi_readers", 1),
        ("mlperf_bert.data.exchange", 0),
    ],
)
def test_who_waits_for_the_loader_is_where_its_thread_is(
    module: str, lines: int, said: list[str]
) -> None:
    reads = function_of("mlperf_bert.data.loader", function_of(module))
    thread = threading.Thread(target=reads, args=(0.7,), name="loader")
    thread.start()
    watched(at_step_37(), function_of("mlperf_bert.data.loader", queued))
    thread.join()
    assert len(said) == lines
    assert all(f"in {module}, line 1; look for storage" in line for line in said)


@pytest.mark.parametrize("module", ["mlperf_bert.data.loader", "mlperf_bert.signals.whereabouts"])
def test_an_error_on_its_way_out_speaks_for_itself(module: str, said: list[str]) -> None:
    leave = function_of(module, queued, name="__exit__")
    try:
        raise RuntimeError("gloo: timed out")
    except RuntimeError:
        watched(at_step_37(), leave)
    assert said == []


def test_who_waits_for_others_says_so_when_they_did_not(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "GRACE", timedelta(seconds=0.05))
    watched(at_step_37(), function_of("mlperf_bert.data.exchange"))
    (line,) = said
    assert "look for a rank that is slow or gone, or a device that does not answer" in line


def test_steps_are_progress(said: list[str]) -> None:
    whereabouts = Whereabouts()
    with watching(INFO, whereabouts, timedelta(seconds=0.4), poll_s=0.02):
        for step in range(40):
            whereabouts.at("step", step)
            time.sleep(0.02)
    assert said == []


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
def test_communication_is_told_by_its_words(raised: Exception, problem: str | None) -> None:
    error = as_lost_ranks(raised, HERE, PATIENCE)
    if problem is None:
        assert error is None
        return
    assert error is not None and error.exit_status == 70
    assert str(error).startswith(f"{HERE}: {problem}; ")


def test_a_slurm_node_has_its_own_name() -> None:
    assert host_name({"SLURMD_NODENAME": "n2"}) == "n2"
    assert host_name({}) != ""
