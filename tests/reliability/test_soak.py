"""A long run that is preempted again and again ends as one that never was, and its memory stays.

`make test-real` runs a minute of it, `make test-slow` ten. `SOAK_STEPS` in the environment makes it
longer.
"""

import os
import random
import statistics
import time
from collections import defaultdict

import pytest

from campaign import DROPOUT, MISSED, STARTS_WITHIN_S, STOPPED, Setup
from jobs import anonymous_bytes
from runs import Run

SEED = 20261122
LONG_STEPS = int(os.environ.get("SOAK_STEPS", "20000"))
LONGEST_S = max(600, LONG_STEPS // 5)  # of an attempt
STOPS_WITHIN_S = 60
SAMPLE_S = 0.2
SETTLED_STEPS = 1000  # of an attempt, before its memory is looked at
LOOKED_AT_STEPS = 500  # after those, and at an attempt's end
MOST_BYTES_PER_1000_STEPS = 2**20  # median of all attempts; 20 MiB in such a run


def settings_of(steps):
    return (
        *(f"run.max_steps={steps}", f"schedule.decay_steps={steps}"),
        f"checkpoint.interval_steps={min(500, steps // 30)}",
        f"eval.interval_samples={16 * min(1000, steps // 20)}",
        *("model.num_layers=1", "model.hidden_size=16", "model.intermediate_size=32"),
        *DROPOUT,
    )


def attempt(setup, run, until_step):
    """Train until it has come so far, or to its end: the status, and own memory by rank and step.

    A rank's steps are counted from where the attempt began.
    """
    before, memory = run.last_step(), defaultdict(list)
    with setup.start(run, "--resume", "auto") as job:
        ranks = job.wait_for_ranks(setup.ranks, STARTS_WITHIN_S)
        job.wait_until(lambda: not job.is_running or run.last_step() != before, STARTS_WITHIN_S)
        deadline = time.monotonic() + LONGEST_S
        while job.is_running and run.last_step() < until_step:
            assert time.monotonic() < deadline
            for rank, process in ranks.items():
                own = anonymous_bytes(process)
                if own:
                    memory[rank].append((run.last_step() - before, own))
            time.sleep(SAMPLE_S)
        job.process.terminate()  # does nothing to one that has ended
        status = job.ended(STOPS_WITHIN_S)
        assert status in (STOPPED, MISSED), job.printed()
    assert run.newest_step() == run.last_step() > before == run.resumed_from()
    return status, memory


def run_soak(tiny, tmp_path, steps, preempted_after):
    """The attempts' memory, of a run that is preempted; it ends equal to one that never was."""
    setup = Setup(*tiny, ranks=2, settings=settings_of(steps))
    whole, run, draw = Run(tmp_path / "whole"), Run(tmp_path / "run"), random.Random(SEED)
    with setup.start(whole) as job:
        assert job.ended(LONGEST_S) == MISSED, job.printed()
    attempts, status = [], None
    while status != MISSED:
        until_step = run.last_step() + draw.randint(*preempted_after)
        status, memory = attempt(setup, run, until_step)
        attempts.append(memory)
    assert len(whole.trace()) == steps
    run.check_final(whole)
    assert len(attempts) > 1
    return attempts


def growth(samples):
    """Bytes in 1,000 steps, from when it had settled to the end; None if that is too short."""
    first = [own for step, own in samples if 0 <= step - SETTLED_STEPS < LOOKED_AT_STEPS]
    end = samples[-1][0] - LOOKED_AT_STEPS
    if not first or end < SETTLED_STEPS:
        return None
    grown = statistics.median(own for step, own in samples if step >= end)
    grown -= statistics.median(first)
    return 1000 * grown / max(end - SETTLED_STEPS, LOOKED_AT_STEPS)


@pytest.mark.real
def test_a_short_soak(tiny, tmp_path):
    run_soak(tiny, tmp_path, 300, preempted_after=(100, 200))


@pytest.mark.longest
@pytest.mark.timeout(2 * LONGEST_S)
def test_soak(tiny, tmp_path):
    """From one attempt to the next, memory: unit/checkpoint/test_resume.py."""
    attempts = run_soak(tiny, tmp_path, LONG_STEPS, preempted_after=(1500, 4500))
    growths = [growth(samples) for memory in attempts for samples in memory.values()]
    growths = [each for each in growths if each is not None]
    assert growths and abs(statistics.median(growths)) < MOST_BYTES_PER_1000_STEPS
