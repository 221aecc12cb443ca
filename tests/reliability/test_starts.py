"""Starts: of a run directory twice, and of ranks whose launcher is killed at any moment of it.

The second start is refused, and the first ends as if it were alone; no rank is left behind. Left
out by ./run_tests.sh.
"""

import os
import sys
import time

import pytest

from campaign import DROPOUT, MISSED, SETTINGS, STARTS_WITHIN_S, Setup
from jobs import LEAVING_S, Job, freeze, kill, thaw
from runs import Run
from support import REPOSITORY, run_process, snapshot

APART_S = 0.3
REFUSED = 2


def names(run):
    return {str(path.relative_to(run.root)) for path in run.root.rglob("*")}


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
    run.check_final(alone)
    assert names(run) == names(alone)


@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="of Linux's parents and children")
@pytest.mark.parametrize("wait_s", [0, 0.01, 0.5])
def test_no_rank_is_left(tiny, tmp_path, monkeypatch, wait_s):
    """The launcher is killed so long after its first rank began."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # it leaves the directory where its ranks met
    with Setup(*tiny, ranks=2).start(Run(tmp_path / "run")) as job:
        job.wait_until(lambda: len(job.processes()) > 1, STARTS_WITHIN_S)
        time.sleep(wait_s)
        kill(job.process.pid)
        job.process.wait()
        deadline = time.monotonic() + LEAVING_S
        while left := job.processes():
            assert time.monotonic() < deadline, f"left: {left.keys()}"
            time.sleep(0.05)
