"""A long run that is preempted every few minutes ends as one that never was, and its memory stays.

`make test-slow` runs it; half an hour on two cores.
"""

import csv
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from campaign import DROPOUT, MISSED, STARTS_WITHIN_S, STOPPED, Setup
from jobs import Job, resident_bytes
from runs import Run

from support import make_tiny_inputs

SEED = 20261122
STOPS_WITHIN_S = 60
ENDS_WITHIN_S = 3600
SAMPLE_S = 1.0
SETTLED_STEPS = 1000  # of an attempt, before its memory is looked at
FEWEST_SAMPLES = 10  # of a rank and an attempt, for a line through them
MOST_BYTES_PER_1000_STEPS = 2**20  # median of all lines; 20 MiB in such a run


@dataclass(frozen=True)
class Plan:
    """How long, and how often it is preempted: after so many seconds of training, at random."""

    steps: int
    shortest_s: float
    longest_s: float

    def settings(self) -> tuple[str, ...]:
        return (
            *(f"run.max_steps={self.steps}", f"schedule.decay_steps={self.steps}"),
            f"checkpoint.interval_steps={max(10, self.steps // 40)}",
            f"eval.interval_samples={16 * max(10, self.steps // 20)}",
            *("model.num_layers=1", "model.hidden_size=16", "model.intermediate_size=32"),
            *DROPOUT,
        )


SHORT = Plan(steps=300, shortest_s=1.0, longest_s=2.0)
LONG = Plan(steps=20_000, shortest_s=60, longest_s=180)


@dataclass(frozen=True)
class Sample:
    """Memory of a rank at a moment."""

    attempt: int
    seconds: float  # since the soak began
    rank: int
    step: int
    resident_bytes: int


@dataclass(frozen=True)
class Slope:
    """A line through a rank's memory in an attempt, after it settled."""

    attempt: int
    rank: int
    bytes_per_1000_steps: float


def soak(setup: Setup, plan: Plan, run: Run) -> Iterator[Sample]:
    """Train to the end, preempted at random; samples of memory meanwhile."""
    rng = random.Random(SEED)
    began, attempt, is_over = time.monotonic(), 0, False
    while not is_over:
        attempt += 1
        with setup.start(run, "--resume", "auto") as job:
            ranks = job.wait_for_ranks(setup.ranks, STARTS_WITHIN_S)
            _await_new_step(job, run)
            stop_at = time.monotonic() + rng.uniform(plan.shortest_s, plan.longest_s)
            while job.is_running and time.monotonic() < stop_at:
                for rank, process in ranks.items():
                    resident = resident_bytes(process)
                    if resident:
                        seconds = time.monotonic() - began
                        yield Sample(attempt, seconds, rank, run.last_step(), resident)
                time.sleep(min(SAMPLE_S, plan.shortest_s / 5))
            is_over = _end(job) == MISSED


def _await_new_step(job: Job, run: Run) -> None:
    """Return also where it ends: it may have been over when it was preempted last."""
    before = run.last_step()
    job.wait_until(lambda: not job.is_running or run.last_step() != before, STARTS_WITHIN_S)


def _end(job: Job) -> int:
    """Preempt it, where it is not over; its status."""
    if job.is_running:
        job.process.terminate()
    status = job.ended(STOPS_WITHIN_S)
    assert status in (STOPPED, MISSED), job.printed()
    return status


def slopes(samples: list[Sample], settled_steps: int) -> list[Slope]:
    """Of each attempt and rank that ran for long enough after it settled."""
    found = []
    for attempt, rank in sorted({(each.attempt, each.rank) for each in samples}):
        own = [each for each in samples if (each.attempt, each.rank) == (attempt, rank)]
        settled = [each for each in own if each.step >= own[0].step + settled_steps]
        if len(settled) >= FEWEST_SAMPLES:
            steps, resident = np.array([(each.step, each.resident_bytes) for each in settled]).T
            slope = np.polynomial.Polynomial.fit(steps, resident, 1).convert().coef[-1]
            found.append(Slope(attempt, rank, 1000 * float(slope)))
    return found


def write_csv(path: Path, samples: list[Sample]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("attempt", "seconds", "rank", "step", "resident_bytes"))
        for each in samples:
            seconds = f"{each.seconds:.1f}"
            writer.writerow((each.attempt, seconds, each.rank, each.step, each.resident_bytes))


def plot(path: Path, samples: list[Sample]) -> None:
    """Memory over steps, a line for each rank; a gap where it was preempted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for attempt, rank in sorted({(each.attempt, each.rank) for each in samples}):
        own = [each for each in samples if (each.attempt, each.rank) == (attempt, rank)]
        label = f"rank {rank}" if attempt == 1 else None
        mebibytes = [each.resident_bytes / 2**20 for each in own]
        axes.plot([each.step for each in own], mebibytes, color=f"C{rank}", label=label)
    axes.set(xlabel="step", ylabel="resident memory, MiB", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=100)


def run_soak(tmp_path: Path, plan: Plan, settled_steps: int) -> list[Slope]:
    """The undisturbed run, the other one, that they are equal, and what is kept of it."""
    data, config = make_tiny_inputs(tmp_path)
    setup = Setup(data, config, ranks=2, settings=plan.settings())
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "run")
    with setup.start(whole) as job:
        assert job.ended(ENDS_WITHIN_S) == MISSED, job.printed()
    samples = list(soak(setup, plan, run))
    found = slopes(samples, settled_steps)
    write_csv(tmp_path / "memory.csv", samples)
    plot(tmp_path / "memory.png", samples)
    lines = [f"seed {SEED}, {plan.steps} steps, {samples[-1].attempt} attempts"]
    lines += [
        f"attempt {each.attempt}, rank {each.rank}: "
        f"{each.bytes_per_1000_steps:+,.0f} bytes per 1,000 steps"
        for each in found
    ]
    assert len(whole.trace()) == plan.steps
    assert run.trace() == whole.trace()
    assert run.final_state() == whole.final_state()
    assert run.outcome() == whole.outcome()
    lines.append("every record and every tensor equal to the undisturbed run's, every bit")
    (tmp_path / "soak.txt").write_text("\n".join(lines) + "\n")
    assert samples[-1].attempt > 1
    return found


@pytest.mark.real
def test_a_short_soak(tmp_path: Path) -> None:
    run_soak(tmp_path, SHORT, settled_steps=0)


@pytest.mark.longest
@pytest.mark.timeout(2 * ENDS_WITHIN_S)
def test_soak(tmp_path: Path) -> None:
    found = run_soak(tmp_path, LONG, SETTLED_STEPS)
    assert found
    middle = statistics.median(each.bytes_per_1000_steps for each in found)
    assert abs(middle) < MOST_BYTES_PER_1000_STEPS
