"""A long run that is preempted again and again ends as one that never was, and its memory stays.

`make test-real` runs a minute of it, `make test-slow` ten. `SOAK_STEPS` in the environment makes it
longer.
"""

import os
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

import pytest

from campaign import DROPOUT, MISSED, STARTS_WITHIN_S, STOPPED, Setup
from jobs import anonymous_bytes
from runs import Run

SEED = 20261122
STOPS_WITHIN_S = 60
SETTLED_STEPS = 1000  # of an attempt, before its memory is looked at
LOOKED_AT_STEPS = 500  # after those, and at an attempt's end
MIB = 2**20
MOST_BYTES_PER_1000_STEPS = MIB  # median of all attempts; 20 MiB in such a run
MOST_HISTORY_BYTES_PER_1000_STEPS = MIB / 19  # at step 20,000 one MiB more than at step 1,000


@dataclass(frozen=True)
class Plan:
    """How long, and how often it is preempted: after so many steps, drawn at random."""

    steps: int
    preempted_after: tuple[int, int]
    sample_s: float

    def settings(self):
        return (
            *(f"run.max_steps={self.steps}", f"schedule.decay_steps={self.steps}"),
            f"checkpoint.interval_steps={min(500, self.steps // 30)}",
            f"eval.interval_samples={16 * min(1000, self.steps // 20)}",
            *("model.num_layers=1", "model.hidden_size=16", "model.intermediate_size=32"),
            *DROPOUT,
        )

    @property
    def ends_within_s(self):
        return max(600, self.steps // 5)


SHORT = Plan(steps=300, preempted_after=(100, 200), sample_s=0.1)
LONG = Plan(int(os.environ.get("SOAK_STEPS", "20000")), preempted_after=(1500, 4500), sample_s=1.0)


def attempt(setup, plan, run, until_step):
    """Train until it has come so far, or to its end: the status, and own memory by rank and step.

    A rank's steps are counted from where the attempt began, which comes first.
    """
    before, memory = run.last_step(), defaultdict(list)
    with setup.start(run, "--resume", "auto") as job:
        ranks = job.wait_for_ranks(setup.ranks, STARTS_WITHIN_S)
        job.wait_until(lambda: not job.is_running or run.last_step() != before, STARTS_WITHIN_S)
        deadline = time.monotonic() + plan.ends_within_s
        while job.is_running and run.last_step() < until_step:
            assert time.monotonic() < deadline
            for rank, process in ranks.items():
                own = anonymous_bytes(process)
                if own:
                    memory[rank].append((run.last_step() - before, own))
            time.sleep(plan.sample_s)
        job.process.terminate()  # does nothing to one that has ended
        status = job.ended(STOPS_WITHIN_S)
        assert status in (STOPPED, MISSED), job.printed()
    return status, before, memory


def run_soak(tiny, tmp_path, plan):
    """The attempts of a run that is preempted; it ends equal to one that never was."""
    setup = Setup(*tiny, ranks=2, settings=plan.settings())
    whole, run, draw = Run(tmp_path / "whole"), Run(tmp_path / "run"), random.Random(SEED)
    with setup.start(whole) as job:
        assert job.ended(plan.ends_within_s) == MISSED, job.printed()
    attempts, status = [], None
    while status != MISSED:
        until_step = run.last_step() + draw.randint(*plan.preempted_after)
        status, before, memory = attempt(setup, plan, run, until_step)
        attempts.append((before, memory))
    assert len(whole.trace()) == plan.steps
    run.check_final(whole)
    assert len(attempts) > 1
    return attempts


def check_memory(attempts):
    """Fail where memory grows within the attempts, or from one resumed attempt to the next."""
    growths, settled = [], defaultdict(list)
    for number, (before, memory) in enumerate(attempts):
        for rank, own in memory.items():
            first = [each for step, each in own if 0 <= step - SETTLED_STEPS < LOOKED_AT_STEPS]
            end = own[-1][0] - LOOKED_AT_STEPS
            last = [each for step, each in own if step >= end]
            if not first or end < SETTLED_STEPS:
                continue
            steps = end - SETTLED_STEPS
            growth = statistics.median(last) - statistics.median(first)
            print(f"attempt {number}, rank {rank}: {growth:+,.0f} bytes in {steps} steps")
            growths.append(1000 * growth / max(steps, LOOKED_AT_STEPS))
            if before:
                settled[rank].append((before, statistics.median(first)))
    assert growths and abs(statistics.median(growths)) < MOST_BYTES_PER_1000_STEPS
    for rank, points in settled.items():
        assert len(points) > 1, "too few resumed attempts of 1,500 steps and more to compare"
        slope, _ = statistics.linear_regression(*zip(*points, strict=True))
        print(f"resumed attempts, rank {rank}: {1000 * slope:+,.0f} bytes for 1,000 steps before")
        assert 1000 * slope <= MOST_HISTORY_BYTES_PER_1000_STEPS, f"rank {rank} holds its history"


@pytest.mark.real
def test_a_short_soak(tiny, tmp_path):
    run_soak(tiny, tmp_path, SHORT)


@pytest.mark.longest
@pytest.mark.timeout(2 * LONG.ends_within_s)
def test_soak(tiny, tmp_path):
    check_memory(run_soak(tiny, tmp_path, LONG))
