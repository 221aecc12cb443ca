"""A long run that is preempted again and again ends as one that never was, and its memory stays.

`make test-slow` runs it; ten minutes on two cores.
"""

import csv
import random
import statistics
import time
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
SETTLED_STEPS = 1000  # of an attempt, before its memory is looked at
FEWEST_SAMPLES = 10  # of a rank and an attempt, for a line through them
MOST_BYTES_PER_1000_STEPS = 2**20  # median of all lines; 20 MiB in such a run


@dataclass(frozen=True)
class Plan:
    """How long, and how often it is preempted: after so many steps, drawn at random."""

    steps: int
    preempted_after: tuple[int, int]
    sample_s: float

    def settings(self) -> tuple[str, ...]:
        return (
            *(f"run.max_steps={self.steps}", f"schedule.decay_steps={self.steps}"),
            f"checkpoint.interval_steps={max(10, self.steps // 40)}",
            f"eval.interval_samples={16 * max(10, self.steps // 20)}",
            *("model.num_layers=1", "model.hidden_size=16", "model.intermediate_size=32"),
            *DROPOUT,
        )


SHORT = Plan(steps=300, preempted_after=(100, 200), sample_s=0.1)
LONG = Plan(steps=20_000, preempted_after=(1500, 4500), sample_s=1.0)


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


class Soak:
    """Trains, and takes samples of memory meanwhile."""

    def __init__(self, setup: Setup, plan: Plan) -> None:
        self._setup = setup
        self._plan = plan
        self._began = time.monotonic()
        self.samples: list[Sample] = []

    def undisturbed(self, run: Run) -> None:
        """Train to the end; the samples are those of attempt 0."""
        with self._setup.start(run) as job:
            self._watch(job, run, 0, self._plan.steps)
            assert job.ended(STOPS_WITHIN_S) == MISSED, job.printed()

    def preempted(self, run: Run) -> int:
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

    def _watch(self, job: Job, run: Run, attempt: int, until_step: int) -> None:
        """Sample until the job ends, or has come so far."""
        ranks = job.wait_for_ranks(self._setup.ranks, STARTS_WITHIN_S)
        before = run.last_step()
        job.wait_until(lambda: not job.is_running or run.last_step() != before, STARTS_WITHIN_S)
        deadline = time.monotonic() + ENDS_WITHIN_S
        while job.is_running and run.last_step() < until_step:
            assert time.monotonic() < deadline
            for rank, process in ranks.items():
                resident = resident_bytes(process)
                if resident:
                    seconds = time.monotonic() - self._began
                    self.samples.append(Sample(attempt, seconds, rank, run.last_step(), resident))
            time.sleep(self._plan.sample_s)


def _end(job: Job) -> int:
    """Preempt it, where it is not over; its status."""
    job.process.terminate()  # does nothing to one that has ended
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
    """How memory grew over steps, a line for each rank; a new one where it was preempted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for attempt, rank in sorted({(each.attempt, each.rank) for each in samples}):
        own = [each for each in samples if (each.attempt, each.rank) == (attempt, rank)]
        label = f"rank {rank}" if attempt == 0 else None
        mebibytes = [(each.resident_bytes - own[0].resident_bytes) / 2**20 for each in own]
        axes.plot([each.step for each in own], mebibytes, color=f"C{rank}", label=label)
    axes.set(xlabel="step", ylabel="resident memory, MiB\nabove the first sample")
    axes.legend()
    figure.savefig(path, dpi=100)


def run_soak(tmp_path: Path, plan: Plan, settled_steps: int) -> list[Slope]:
    """The undisturbed run, the other one, that they are equal, and what is kept of it."""
    data, config = make_tiny_inputs(tmp_path)
    setup = Setup(data, config, ranks=2, settings=plan.settings())
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "run")
    soak = Soak(setup, plan)
    soak.undisturbed(whole)
    attempts = soak.preempted(run)
    found = slopes(soak.samples, settled_steps)
    write_csv(tmp_path / "memory.csv", soak.samples)
    plot(tmp_path / "memory.png", soak.samples)
    lines = [f"seed {SEED}, {plan.steps} steps, {attempts} attempts; attempt 0 is undisturbed"]
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
    assert attempts > 1
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
