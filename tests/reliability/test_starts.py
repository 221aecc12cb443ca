"""Starts: of a run directory twice, and of ranks whose launcher is killed at any moment of it.

The second start is refused, and the first ends as if it were alone; no rank is left behind. Left
out by ./run_tests.sh: `make test-real` kills three launchers, `make test-slow` twenty.
"""

import os
import random
import sys
import time

import pytest

from campaign import DROPOUT, MISSED, SETTINGS, STARTS_WITHIN_S, Setup
from jobs import LEAVING_S, Job, freeze, kill, thaw
from runs import Run
from support import REPOSITORY, run_process, snapshot

SEED = 20261123
APART_S = 0.3
REFUSED = 2


def result(run):
    """The facts that equal runs share: names of all files, losses, and tensors, bit by bit."""
    names = {str(path.relative_to(run.root)) for path in run.root.rglob("*")}
    of_a_run = {"trace": run.trace(), "outcome": run.outcome(), **run.final_state()}
    same = ("config.toml", "vocab.txt", "checkpoints/LATEST")
    return {
        "names": names,
        **of_a_run,
        **{each: (run.directory / each).read_bytes() for each in same},
    }


def check_refused(printed, owner):
    (line,) = [each for each in printed.splitlines() if "error" in each]
    owned_by = f"process {owner.process.pid} on host {os.uname().nodename} since "
    assert line.startswith("mlperf_bert: error: --run-dir: run_0 in ") and owned_by in line


@pytest.mark.real
def test_who_comes_second_is_refused_and_changes_nothing(tiny, tmp_path):
    settings = (*SETTINGS, *DROPOUT, "checkpoint.interval_steps=0")  # else the disk decides which
    setup = Setup(*tiny, ranks=1, settings=settings)
    alone, run = Run(tmp_path / "alone"), Run(tmp_path / "run")
    setup.train(alone)
    same_run = setup.arguments(run)
    with Job(same_run, tmp_path / "a") as first:
        time.sleep(APART_S)
        with Job(same_run, tmp_path / "b") as second:
            while run.last_step() < 1:
                assert first.is_running or second.is_running, first.printed() + second.printed()
                time.sleep(0.01)
            # On a busy machine the later one may have been there before.
            is_first = f"process {first.process.pid} on " in (run.root / ".run_0.lock").read_text()
            owner, other = (first, second) if is_first else (second, first)
            freeze([owner.process.pid])
            before = snapshot(run.root)
            assert other.ended(STARTS_WITHIN_S) == REFUSED, other.printed()
            check_refused(other.printed(), owner)
            done = run_process(
                REPOSITORY / "run_and_time.sh",
                PYTHON=sys.executable,
                CONFIG=str(setup.config),
                DATADIR=str(setup.data),
                LOGDIR=str(run.root),
                RESUME="auto",
                CLEAR_CACHES="0",
            )
            assert done.returncode == REFUSED
            check_refused(done.stderr, owner)
            assert snapshot(run.root) == before
            thaw([owner.process.pid])
            assert owner.ended(STARTS_WITHIN_S) == MISSED, owner.printed()
    assert result(run) == result(alone)


def leaves_none(setup, root, wait_s):
    """Kill the launcher so long after its first rank began; what the ranks were at then."""
    run = Run(root)
    with setup.start(run) as job:
        job.wait_until(lambda: len(job.processes()) > 1, STARTS_WITHIN_S)
        time.sleep(wait_s)
        phase = f"{len(job.processes()) - 1} ranks, step {run.last_step()}"
        kill(job.process.pid)
        job.process.wait()
        deadline = time.monotonic() + LEAVING_S
        while left := job.processes():
            assert time.monotonic() < deadline, f"left after {wait_s:.3f} s: {left.keys()}"
            time.sleep(0.05)
    return phase


@pytest.fixture
def temporary_files(tmp_path, monkeypatch):
    """A launcher that is killed leaves the directory where its ranks met."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


DRAW = random.Random(SEED)
TWENTY = [DRAW.choice((0.01, 0.1, 1, 10)) * DRAW.random() for _ in range(20)]


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux's parents and children")
@pytest.mark.usefixtures("temporary_files")
@pytest.mark.parametrize(
    "waits_s",
    [
        pytest.param((0, 0.01, 0.5), marks=pytest.mark.real, id="three"),
        pytest.param(TWENTY, marks=pytest.mark.longest, id="twenty"),
    ],
)
def test_no_rank_is_left(tiny, tmp_path, waits_s):
    setup = Setup(*tiny, ranks=2)
    for number, wait_s in enumerate(waits_s):
        phase = leaves_none(setup, tmp_path / f"run-{number}", wait_s)
        print(f"killed {wait_s:.3f} s after the first rank began: {phase}; nothing left")
