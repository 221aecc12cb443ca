"""Disks that are full, cannot be written or are slow: training goes on, and says what it lacks.

Left out by ./run_tests.sh; `make test-real` runs some, `make test-slow` the rest.
"""

import os
import re
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from campaign import MISSED, STARTS_WITHIN_S, Setup
from full_disk import mounted
from jobs import Job, freeze, thaw
from runs import Run

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")

FAILED = 2  # status of a run whose last checkpoint could not be written
STEPS = 200
FREE_BYTES = 600_000  # left on a full disk: logs fit, and the first files of a checkpoint
SETTINGS = (
    *(f"run.max_steps={STEPS}", f"schedule.decay_steps={STEPS}"),
    "checkpoint.interval_steps=10",
    *("model.hidden_size=64", "model.intermediate_size=256"),
)

# Runs the command line on a disk that takes its time to have on it what was written.
WITH_SLOW_FLUSHES = """
import os, runpy, time
flush = os.fsync
def slow(file):
    time.sleep(0.4)
    flush(file)
os.fsync = slow
runpy.run_module("mlperf_bert", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def setup(tiny):
    return Setup(*tiny, ranks=1, settings=SETTINGS)


@contextmanager
def frozen(job):
    """Its ranks stand still."""
    processes = list(job.ranks().values()) or [job.process.pid]
    freeze(processes)
    try:
        yield
    finally:
        thaw(processes)


@pytest.fixture
def small_disk(tmp_path):
    with mounted("-t", "tmpfs", "-o", "size=32m", "tmpfs", at=tmp_path / "disk") as directory:
        yield directory


def fill(disk):
    status = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(bytes(status.f_bavail * status.f_frsize - FREE_BYTES))
    return filler


def await_checkpoint(job, run):
    """Return when there is one, LATEST names it, and none is being written."""
    latest = run.checkpoints / "LATEST"
    job.wait_until(lambda: latest.exists() and not run.partials(), STARTS_WITHIN_S)


def failures(job):
    """Steps of the checkpoints that it said could not be written, and why."""
    said = re.findall(r"^checkpoint step_(\d+) could not be written \((.*)\)", job.printed(), re.M)
    return {int(step): reason for step, reason in said}


@pytest.mark.real
@needs_root
def test_a_disk_that_is_full_for_a_while(setup, small_disk, tmp_path):
    """Each rank writes its part of a checkpoint, of which another's may fit."""
    setup = replace(setup, ranks=2, settings=(*SETTINGS, "parallel.data_parallel=zero1"))
    run = Run(small_disk / "run")
    with Job(setup.arguments(run), tmp_path / "output") as job:
        await_checkpoint(job, run)
        with frozen(job):
            filler = fill(small_disk)
            newest = run.newest_step()
        job.wait_until(lambda: bool(failures(job)), STARTS_WITHIN_S)
        with frozen(job):
            assert run.last_step() > newest  # training went on
            assert run.newest_step() == newest
            run.check_checkpoints()
            filler.unlink()
        assert job.ended(STARTS_WITHIN_S) == MISSED, job.printed()
        assert all("No space left" in reason for reason in failures(job).values())
        assert STEPS not in failures(job)
    assert run.newest_step() == run.last_step() == STEPS
    assert run.partials() == set()
    run.check_checkpoints()


@contextmanager
def full(disk, _):
    yield fill(disk)


@contextmanager
def read_only(_, run):
    place = str(run.checkpoints)
    with mounted("--bind", place, at=run.checkpoints):
        subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
        yield


@pytest.mark.longest
@needs_root
@pytest.mark.parametrize(
    ("harm", "why", "ranks"),
    [
        (full, "No space left", 1),
        (read_only, "Read-only file system", 1),
        # Rank 1's part of a checkpoint may fit where rank 0's does not.
        (full, "No space left", 2),
    ],
)
def test_a_disk_that_takes_nothing_any_more(setup, small_disk, tmp_path, harm, why, ranks):
    sharded = ("parallel.data_parallel=zero1",) if ranks > 1 else ()
    setup = replace(setup, ranks=ranks, settings=(*SETTINGS, *sharded))
    run = Run(small_disk / "run")
    with Job(setup.arguments(run), tmp_path / "output") as job, ExitStack() as harmed:
        await_checkpoint(job, run)
        with frozen(job):
            newest = run.newest_step()
            harmed.enter_context(harm(small_disk, run))
        assert job.ended(STARTS_WITHIN_S) == FAILED, job.printed()
        last_line = job.printed().rstrip().rpartition("\n")[2]
        assert last_line.startswith("mlperf_bert: error: ")
        assert f"step_{STEPS:08d}" in last_line and why in last_line
        assert all(why in reason for reason in failures(job).values())
        assert set(failures(job)) >= {newest + 20, newest + 30}
    assert run.last_step() == STEPS
    assert run.newest_step() == newest
    assert run.partials() == set()
    assert run.check_checkpoints() >= 1


@pytest.mark.real
@needs_root
def test_a_run_directory_that_cannot_be_written(setup, small_disk, tmp_path):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with Job(setup.arguments(Run(small_disk / "run")), tmp_path / "output") as job:
        assert job.ended(STARTS_WITHIN_S) == 2
        (line,) = [line for line in job.printed().splitlines() if "error" in line]
    assert "--run-dir" in line and "Read-only file system" in line
    assert list(small_disk.iterdir()) == []


@pytest.mark.longest
def test_a_slow_disk(setup, tmp_path):
    """Flushes of 0.4 s each, several to a checkpoint: steps take a hundredth of that."""
    run = Run(tmp_path / "run")
    command = (sys.executable, "-c", WITH_SLOW_FLUSHES)
    with Job(setup.arguments(run), tmp_path / "output", command=command) as job:
        job.wait_until(lambda: bool(run.partials()), STARTS_WITHIN_S)
        first = run.last_step()
        job.wait_until(lambda: run.last_step() >= first + 20, STARTS_WITHIN_S)
        assert run.newest_step() == 0  # all these steps were made while one was being written
        assert job.ended(STARTS_WITHIN_S) == MISSED, job.printed()
        passed_over = re.findall(r"^skipped the checkpoint after step \d+ ", job.printed(), re.M)
        assert passed_over
    assert run.newest_step() == STEPS
    run.check_checkpoints()
