"""A rank's time in the process group: nothing that holds the group outlives it."""

import gc
import os
import threading
import weakref
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from mlperf_bert.checkpoint.manifest import CheckpointState
from mlperf_bert.checkpoint.resume import NEW_RUN, Start
from mlperf_bert.distributed import session
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import from_all_ranks, from_rank_zero, on_every_rank
from mlperf_bert.distributed.signal_watch import Whereabouts
from mlperf_bert.errors import LOST, CheckpointError, DataError, LostRanksError, UserError
from mlperf_bert.run.outcome import RunOutcome

ALONE = RankInfo(0, 1, 0, 1, 0, "single")
ONE_OF_TWO = RankInfo(0, 2, 0, 2, 0, "mpi")


def of_all_ranks():
    error = DataError("a", "b", "c")
    error.is_of_all_ranks = True
    return error


def returns(wrapped):
    return 0


def raises(wrapped):
    raise of_all_ranks()


def raises_for_another(wrapped):
    try:
        raises(wrapped)
    except UserError:
        raise of_all_ranks() from None


@pytest.fixture
def without_luck():
    """The collector does not come by itself."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_luck")
@pytest.mark.parametrize("end", [returns, raises, raises_for_another])
def test_what_a_run_built_is_gone_before_the_group(end, monkeypatch):
    built = []
    alive = []
    monkeypatch.setattr(session, "shutdown", lambda: alive.append(built[0]() is not None))

    def run(info, device):
        wrapped = torch.nn.Identity()
        wrapped.itself = wrapped  # in a reference cycle, as DistributedDataParallel
        built.append(weakref.ref(wrapped))
        return end(wrapped)

    with nullcontext() if end is returns else pytest.raises(DataError):
        assert session.in_session(run, "cpu", "refuse", ALONE) == 0
    assert alive == [False]


def test_a_rank_that_fails_alone_does_not_wait_to_leave_the_group(monkeypatch):
    def run(info, device):
        raise DataError("a", "b", "c")

    monkeypatch.setattr(session, "shutdown", lambda: pytest.fail("others may wait in the group"))
    with pytest.raises(DataError):
        session.in_session(run, "cpu", "refuse", ALONE)


def test_a_rank_that_hangs_is_ended(monkeypatch, capsys):
    whereabouts, ended = Whereabouts(), threading.Event()
    statuses = []

    def leave(status):
        statuses.append(status)
        ended.set()

    def hang(info, device):
        whereabouts.at("step", 37)
        assert ended.wait(60)
        return 0

    monkeypatch.setattr(os, "_exit", leave)
    patience = timedelta(seconds=0.2)
    assert session.in_session(hang, "cpu", "refuse", ALONE, patience, whereabouts) == 0
    assert statuses == [LOST]
    assert "step 37: the rank made no progress for 0.2 s" in capsys.readouterr().err


@pytest.mark.parametrize(("launcher", "parents"), [("torchrun", [os.getppid()]), ("mpi", [])])
def test_a_rank_of_torchrun_ends_with_its_agent(launcher, parents, monkeypatch):
    told = []
    monkeypatch.setattr(session, "end_with_parent", told.append)
    rank = RankInfo(0, 1, 0, 1, 0, launcher)
    assert session.in_session(lambda *_: 0, "cpu", "refuse", rank) == 0
    assert told == parents


@pytest.fixture
def other_rank(monkeypatch):
    """Rank 0 of two gathers; what rank 1 sends stands in the list, or else its own again."""
    sent = []

    def all_gather(of_ranks, own):
        theirs = own.clone()
        if sent and own.dtype == torch.int64:
            theirs[0] = len(sent[0])
        elif sent:
            theirs[:] = torch.tensor(list(sent[0].ljust(len(own))), dtype=torch.uint8)
        for each, value in zip(of_ranks, (own, theirs), strict=True):
            each.copy_(value)

    monkeypatch.setattr(session.dist, "all_gather", all_gather)
    return sent


@pytest.mark.parametrize("value", [7, "wört", None, [1, [0.1, None], {"a": [float("inf")]}], {}])
@pytest.mark.usefixtures("other_rank")
def test_values_travel_as_json(value):
    assert from_all_ranks(ONE_OF_TWO, value) == [value, value]
    assert from_rank_zero(ONE_OF_TWO, value) == value
    assert from_all_ranks(ALONE, value) == [value]


@pytest.mark.parametrize(
    "sent", [b"", b"1".rjust(session.MOST_BYTES + 1), b"\x80\x04N.", b"[" * 9999]
)
def test_what_no_rank_sends_is_refused(sent, other_rank):
    other_rank.append(sent)
    with pytest.raises(LostRanksError, match=r"rank 1: this rank sent (a message|invalid JSON)"):
        from_all_ranks(ONE_OF_TWO, 1)


def test_what_another_rank_sends_arrives_whole(other_rank):
    other_rank.append(b'"a longer one"')
    assert from_all_ranks(ONE_OF_TWO, "a") == ["a", "a longer one"]
    other_rank[:] = [b"1"]
    assert from_all_ranks(ONE_OF_TWO, 1000) == [1000, 1]
    other_rank[:] = [b'["CheckpointError", "where", "what", "how"]']
    with pytest.raises(CheckpointError, match="where: what; how"):
        on_every_rank(ONE_OF_TWO, lambda: 0)


@pytest.mark.usefixtures("other_rank")
@pytest.mark.parametrize("info", [ALONE, ONE_OF_TWO])
def test_an_error_arrives_as_it_is_shown(info):
    class OwnError(LostRanksError):
        """A kind that other ranks need not know."""

    error = OwnError("a\nb\udcff", "long" * 10**6, "")

    def fail():
        raise error

    with pytest.raises(LostRanksError) as raised:
        on_every_rank(info, fail)
    assert str(raised.value) == str(error)


def test_a_start_travels():
    state = {"step": 1, "samples": 2, "seed": 3, "mlm_accuracy": 0.1, "vocabulary_sha256": "v"}
    ended = {"status": "aborted", "steps": 1, "samples": 2, "seconds": 0.3}
    resumed = Start(
        checkpoint=Path("step_1"),
        state=CheckpointState(**state),
        continues=True,
        is_resumed=True,
        seed=3,
        remarks=("one", "two"),
        ended=RunOutcome(**ended, mlm_accuracy=None, stopped_by="SIGTERM"),
    )
    for start in (NEW_RUN, resumed):
        assert Start.from_plain(from_rank_zero(ALONE, start.to_plain())) == start
