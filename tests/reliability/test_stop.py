"""Ends from outside: a signal to the shell, before and after the first step.

SIGTERM, SIGUSR1 and a container's: tests/slurm, tests/container. A rank that dies: test_kills.py.
"""

import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from jobs import Job, freeze, kill, thaw
from runs import Run
from support import REPOSITORY, sets_of

SCRIPT = REPOSITORY / "run_and_time.sh"
GO_ON = (
    r"to resume: RESUME=auto LOGDIR={} CONFIG=.* \S*/run_and_time\.sh -- --set run.max_steps=.*$"
)
ENDLESS = sets_of(
    *("run.max_steps=1000000", "eval.interval_samples=100000000"),
    *("parallel.ranks_per_node=2", "parallel.local_batch_size=8"),
)
WITHIN_S = 120
ENDS_WITHIN_S = 60


def started(tiny, run, **options):
    """run_and_time.sh that trains without end, on two ranks."""
    data, config = tiny
    settings = {"CONFIG": config, "DATADIR": data, "LOGDIR": run.root, "PYTHON": sys.executable}
    settings |= {"CLEAR_CACHES": "0", **options}
    return Job(["--", *ENDLESS], run.root.with_suffix(".output"), command=(SCRIPT,), **settings)


def await_steps(job):
    job.wait_until(lambda: job.says(r"^step \d+/"), WITHIN_S)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def test_the_shell_passes_ctrl_c_on(tiny, run):
    with started(tiny, run) as job:
        await_steps(job)
        job.process.send_signal(signal.SIGINT)
        assert job.ended(ENDS_WITHIN_S) == 75, job.printed()
        assert job.says(r"^received SIGINT and stopped after step \d+")
        assert job.says("^mlperf_bert: saving and stopping because of Ctrl-C ")
        assert job.says(GO_ON.format(re.escape(str(run.root))))
    assert '"status": "aborted"' in run.log.read_text().splitlines()[-1]
    assert (run.checkpoints / "LATEST").exists()


@pytest.mark.longest
def test_before_the_first_step_a_signal_ends_every_rank(tiny, run):
    """One rank is held back, so that the other waits for it: not in Python, where handlers run."""
    with started(tiny, run) as job:
        ranks = job.wait_for_ranks(2, WITHIN_S)
        freeze([ranks[1]])
        job.wait_until(lambda: has_come(ranks[0]), WITHIN_S)
        time.sleep(0.5)  # and waits for the other
        job.process.send_signal(signal.SIGTERM)
        said = "^mlperf_bert: stopped by SIGTERM before the first step, so no training was lost$"
        job.wait_until(lambda: job.says(said), WITHIN_S)
        thaw([ranks[1]])
        assert job.ended(ENDS_WITHIN_S) == 75, job.printed()
        assert "Traceback" not in job.printed()
    assert not (run.checkpoints / "LATEST").exists()


def has_come(rank):
    """True if the rank has reached the meeting point."""
    environ = Path(f"/proc/{rank}/environ").read_bytes().split(b"\0")
    place = next(word for word in environ if word.startswith(b"MLPERF_BERT_MEETING="))
    return os.path.exists(place.partition(b"=")[2])


@pytest.mark.real
def test_nothing_is_lost_with_a_terminal_or_a_shell(tiny, run):
    """The terminal is closed; the run goes on in another, whose shell is killed."""
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    shown = bytearray()

    def trains():
        with suppress(BlockingIOError):
            shown.extend(os.read(ours, 65536))
        return run.last_step() > 0

    with started(tiny, run, terminal=theirs) as job:
        os.close(theirs)
        job.wait_until(trains, WITHIN_S)
        os.close(ours)
        assert job.ended(ENDS_WITHIN_S) == 75
    said = (run.directory / "stdout.log").read_text()
    assert re.search(r"received SIGHUP and stopped after step (\d+)$", said, re.MULTILINE)
    assert re.search(GO_ON.format(re.escape(str(run.root))), said, re.MULTILINE)
    assert b"arning" not in shown and b"Traceback" not in shown
    checkpoint = run.newest_step()

    with started(tiny, run, RESUME="auto") as job:
        await_steps(job)
        kill(job.process.pid)
        job.ended(ENDS_WITHIN_S)
        # The outcome is the same as if it had been asked to end.
        assert job.says("^received SIGTERM and stopped after step")
    assert run.newest_step() > checkpoint
