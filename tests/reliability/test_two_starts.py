"""A run directory is started twice: the second is refused, the first ends as if it were alone.

Left out by ./run_tests.sh; `make test-real` runs it.
"""

import os
import sys
import time
from pathlib import Path

import pytest
from campaign import DROPOUT, MISSED, SETTINGS, STARTS_WITHIN_S, Setup, undisturbed
from jobs import Job, freeze, thaw
from runs import Run

from support import REPOSITORY, make_tiny_inputs, run_process, snapshot

pytestmark = pytest.mark.real
APART_S = 0.3
REFUSED = 2


def relative_names(run: Run) -> set[str]:
    return {str(path.relative_to(run.root)) for path in run.root.rglob("*")}


def check_refused(printed: str, owner: Job) -> None:
    (line,) = [each for each in printed.splitlines() if "error" in each]
    owned_by = f"process {owner.process.pid} on host {os.uname().nodename} since "
    assert line.startswith("mlperf_bert: error: --run-dir: run_0 in ") and owned_by in line


def test_who_comes_second_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    settings = (*SETTINGS, *DROPOUT, "run.device=cpu")
    setup = Setup(*make_tiny_inputs(tmp_path), ranks=1, settings=settings)
    whole = undisturbed(setup, tmp_path / "whole")
    run = Run(tmp_path / "run")
    same_run = setup.arguments(run)
    with Job(same_run, tmp_path / "a") as first:
        time.sleep(APART_S)
        with Job(same_run, tmp_path / "b") as second:
            while first.is_running and second.is_running:
                time.sleep(0.01)
            # On a busy machine the later one may be there before.
            owner, other = (first, second) if first.is_running else (second, first)
            assert other.ended(1) == REFUSED
            check_refused(other.printed(), owner)
            owner.wait_until(lambda: run.last_step() >= 1, STARTS_WITHIN_S)
            freeze([owner.process.pid])
            before = snapshot(run.root)
            with setup.start(run, "--resume", "auto") as third:
                assert third.ended(STARTS_WITHIN_S) == REFUSED
                check_refused(third.printed(), owner)
            done = run_process(
                REPOSITORY / "run_and_time.sh",
                "--",
                *("--set", "parallel.ranks_per_node=1"),
                PYTHON=sys.executable,
                CONFIG=str(setup.config),
                DATADIR=str(setup.data),
                LOGDIR=str(run.root),
                CLEAR_CACHES="0",
            )
            assert done.returncode == REFUSED
            check_refused(done.stderr, owner)
            assert snapshot(run.root) == before
            thaw([owner.process.pid])
            assert owner.ended(STARTS_WITHIN_S) == MISSED, owner.printed()
    whole.check_final(run)
    assert relative_names(run) == relative_names(whole.run)
