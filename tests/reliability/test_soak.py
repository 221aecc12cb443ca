"""A long run that is preempted again and again ends as one that never was, and its memory stays.

`make test-slow` runs it; ten minutes on two cores. `SOAK_STEPS` in the environment makes it longer.
"""

import csv
import os
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

from campaign import DROPOUT, MISSED, STARTS_WITHIN_S, STOPPED, Setup
from jobs import anonymous_bytes
from runs import Run
from support import REPOSITORY

SEED = 20261122
STOPS_WITHIN_S = 60
SETTLED_STEPS = 1000  # of an attempt, before its memory is looked at
LOOKED_AT_STEPS = 500  # after those, to compare attempts
FIRST_RESUMED = 2  # attempt; the undisturbed one is 0, the first of the other run 1
FEWEST_SAMPLES = 10  # of a rank and an attempt, for a line through them
MOST_BYTES_PER_1000_STEPS = 2**20  # median of all lines; 20 MiB in such a run
MOST_HISTORY_BYTES_PER_1000_STEPS = 2**20 / 19  # at step 20,000 one MiB more than at step 1,000


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


class Sample(NamedTuple):
    """Memory of a rank at a moment."""

    attempt: int
    seconds: float  # since the soak began
    rank: int
    step: int
    anonymous_bytes: int


class Soak:
    """Trains, and takes samples of memory meanwhile."""

    def __init__(self, setup, plan):
        self._setup = setup
        self._plan = plan
        self._began = time.monotonic()
        self.samples = []

    def undisturbed(self, run):
        """Train to the end; the samples are those of attempt 0."""
        with self._setup.start(run) as job:
            self._watch(job, run, 0, self._plan.steps)
            assert job.ended(STOPS_WITHIN_S) == MISSED, job.printed()

    def preempted(self, run):
        """Train to the end, preempted at random; how many attempts it took."""
        rng = random.Random(SEED)
        attempt, is_over = 0, False
        while not is_over:
            attempt += 1
            until_step = run.last_step() + rng.randint(*self._plan.preempted_after)
            with self._setup.start(run, "--resume", "auto") as job:
                self._watch(job, run, attempt, until_step)
                is_over = _end(job) == MISSED
        return attempt

    def _watch(self, job, run, attempt, until_step):
        """Sample until the job ends, or has come so far."""
        ranks = job.wait_for_ranks(self._setup.ranks, STARTS_WITHIN_S)
        before = run.last_step()
        job.wait_until(lambda: not job.is_running or run.last_step() != before, STARTS_WITHIN_S)
        deadline = time.monotonic() + self._plan.ends_within_s
        while job.is_running and run.last_step() < until_step:
            assert time.monotonic() < deadline
            for rank, process in ranks.items():
                own = anonymous_bytes(process)
                if own:
                    seconds = time.monotonic() - self._began
                    self.samples.append(Sample(attempt, seconds, rank, run.last_step(), own))
            time.sleep(self._plan.sample_s)


def _end(job):
    job.process.terminate()  # does nothing to one that has ended
    status = job.ended(STOPS_WITHIN_S)
    assert status in (STOPPED, MISSED), job.printed()
    return status


def by_attempt_and_rank(samples):
    found = defaultdict(list)
    for each in samples:
        found[each.attempt, each.rank].append(each)
    return dict(sorted(found.items()))


def slopes(samples, settled_steps):
    """Bytes for 1,000 steps of each attempt and rank that ran long enough after it settled."""
    found = {}
    for key, own in by_attempt_and_rank(samples).items():
        settled = [each for each in own if each.step >= own[0].step + settled_steps]
        if len(settled) >= FEWEST_SAMPLES:
            found[key] = _slope([(each.step, each.anonymous_bytes) for each in settled])
    return found


def held_of_history(samples, settled_steps):
    """By rank: bytes that a resumed attempt needs more for each 1,000 steps made before it.

    Attempts are compared where all have made as many steps of their own: memory settles for long.
    """
    looked_at = range(settled_steps, settled_steps + LOOKED_AT_STEPS)
    points = defaultdict(list)
    for (attempt, rank), own in by_attempt_and_rank(samples).items():
        there = [each.anonymous_bytes for each in own if each.step - own[0].step in looked_at]
        if attempt >= FIRST_RESUMED and there:
            points[rank].append((own[0].step, statistics.median(there)))
    return {rank: _slope(own) for rank, own in points.items() if len(own) > 1}


def check_memory(samples, settled_steps):
    """Fail where memory grows within the attempts, or from one attempt to the next."""
    found, held = slopes(samples, settled_steps), held_of_history(samples, settled_steps)
    assert found
    assert held, "too few resumed attempts of 1,000 steps and more to compare"
    assert abs(statistics.median(found.values())) < MOST_BYTES_PER_1000_STEPS
    for rank, num_bytes in held.items():
        assert num_bytes <= MOST_HISTORY_BYTES_PER_1000_STEPS, f"rank {rank} holds its history"


def _slope(points):
    """The slope of the least-squares line through bytes over steps, for 1,000 steps."""
    steps, num_bytes = np.array(points).T
    return 1000 * float(np.polynomial.Polynomial.fit(steps, num_bytes, 1).convert().coef[-1])


def write_csv(path, samples):
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Sample._fields)
        writer.writerows(each._replace(seconds=f"{each.seconds:.1f}") for each in samples)


def plot(path, samples):
    """How memory grew over steps, a line for each rank; a new one where it was preempted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for (attempt, rank), own in by_attempt_and_rank(samples).items():
        label = f"rank {rank}" if attempt == 0 else None
        first = next(each.anonymous_bytes for each in samples if each.rank == rank)
        mebibytes = [(each.anonymous_bytes - first) / 2**20 for each in own]
        axes.plot([each.step for each in own], mebibytes, color=f"C{rank}", label=label)
    axes.set(xlabel="step", ylabel="own memory, MiB\nabove the first sample")
    axes.legend()
    figure.savefig(path, dpi=100)


def run_soak(tiny, tmp_path, plan, settled_steps):
    """The undisturbed run, the other one, that they are equal, and what is kept of it."""
    setup = Setup(*tiny, ranks=2, settings=plan.settings())
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "run")
    soak = Soak(setup, plan)
    soak.undisturbed(whole)
    attempts = soak.preempted(run)
    write_csv(tmp_path / "memory.csv", soak.samples)
    plot(tmp_path / "memory.png", soak.samples)
    lines = [f"seed {SEED}, {plan.steps} steps, {attempts} attempts; attempt 0 is undisturbed"]
    lines += [
        f"attempt {attempt}, rank {rank}: {num_bytes:+,.0f} bytes per 1,000 steps"
        for (attempt, rank), num_bytes in slopes(soak.samples, settled_steps).items()
    ]
    lines += [
        f"resumed attempts, rank {rank}: {num_bytes:+,.0f} bytes for 1,000 steps made before"
        for rank, num_bytes in held_of_history(soak.samples, settled_steps).items()
    ]
    assert len(whole.trace()) == plan.steps
    assert run.trace() == whole.trace()
    assert run.final_state() == whole.final_state()
    assert run.outcome() == whole.outcome()
    lines.append("every record and every tensor equal to the undisturbed run's, every bit")
    (tmp_path / "soak.txt").write_text("\n".join(lines) + "\n")
    assert attempts > 1
    return soak.samples


@pytest.mark.longest
def test_a_short_soak(tiny, tmp_path):
    run_soak(tiny, tmp_path, SHORT, settled_steps=0)


@pytest.mark.longest
@pytest.mark.timeout(2 * LONG.ends_within_s)
def test_soak(tiny, tmp_path):
    check_memory(run_soak(tiny, tmp_path, LONG, SETTLED_STEPS), SETTLED_STEPS)


def test_a_soak_whose_resumes_hold_their_history_is_refused():
    """The first one: its rank 0 held 2.1 KiB of each past step, and rank 1 nothing."""
    with (REPOSITORY / "logs/2026-11-22-soak/memory.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    samples = [Sample(int(a), float(s), int(r), int(step), int(n)) for a, s, r, step, n in rows]
    with pytest.raises(AssertionError, match="rank 0 holds its history"):
        check_memory(samples, SETTLED_STEPS)
    check_memory([each for each in samples if each.rank == 1], SETTLED_STEPS)
    held = held_of_history(samples, SETTLED_STEPS)
    assert held[0] == pytest.approx(1000 * 2.1 * 1024, rel=0.1)
