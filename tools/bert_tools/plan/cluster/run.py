"""A whole run: steps to the target, evaluations, start-up and skipped steps around a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bert_tools.plan.cluster.software import Software
from bert_tools.plan.cluster.step import Job, StepTiming, jitter, simulate_step
from bert_tools.plan.cluster.workload import Workload, even_workload

EVALUATION_SAMPLES = 10_000
_EVALUATION_BATCH = 16  # of every published run
_MEAN_TOKENS, _MEAN_MASKED = 256, 38
_EVALUATION_COLLECTIVES = 3  # correct, masked, loss
_HOST_READS = 2  # of an evaluation's sums


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInputs:
    """What a run's time needs beside its steps; `samples` are until the target is reached."""

    global_batch_size: int
    samples: float
    start_up_s: float = 0.0
    skipped_steps: int = 0
    evaluation_interval: int | Literal["mlperf"] = "mlperf"

    @property
    def interval_samples(self) -> int:
        """Samples between two evaluations: given, or by the rules' formula (section 7)."""
        if self.evaluation_interval != "mlperf":
            return self.evaluation_interval
        samples = 0.05 * (230.23 * self.global_batch_size + 3_000_000)
        return int(samples // 25_000) * 25_000

    @property
    def steps(self) -> int:
        """Updates until the target is reached, skipped ones left out."""
        return math.ceil(self.samples / self.global_batch_size)

    @property
    def evaluations(self) -> int:
        """The last one included."""
        return max(1, math.floor(self.samples / self.interval_samples))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTime:
    """Where a run's time goes, in seconds; `step_ms` is the mean over drawn steps."""

    step_ms: float
    steps: int
    skipped_steps: int
    evaluations: int
    evaluation_ms: float
    start_up_s: float

    @property
    def seconds(self) -> float:
        """From the start of the clock to the target."""
        training_ms = (self.steps + self.skipped_steps) * self.step_ms
        return self.start_up_s + (training_ms + self.evaluations * self.evaluation_ms) / 1e3

    @property
    def steady_step_ms(self) -> float:
        """A step with its share of evaluations, as between a log's first and last evaluation."""
        return self.step_ms + self.evaluations * self.evaluation_ms / self.steps


def simulate_steps(job: Job, works: Sequence[Workload], seed: int = 0) -> list[StepTiming]:
    """Every drawn step, each with jitter of its own."""
    fraction = job.constants.jitter_fraction
    return [
        simulate_step(job, work, jitter(work.world_size, fraction, seed + number))
        for number, work in enumerate(works)
    ]


def mean_step_ms(timings: Sequence[StepTiming]) -> float:
    """Over drawn steps."""
    return float(np.mean([timing.step_ms for timing in timings]))


def run_time(job: Job, step_ms: float, inputs: RunInputs) -> RunTime:
    """The whole run with steps of this length."""
    return RunTime(
        step_ms=step_ms,
        steps=inputs.steps,
        skipped_steps=inputs.skipped_steps,
        evaluations=inputs.evaluations,
        evaluation_ms=evaluation_ms(job),
        start_up_s=inputs.start_up_s,
    )


def evaluation_ms(job: Job) -> float:
    """One evaluation: forwards over a rank's share of the held-out samples, then three sums."""
    share = math.ceil(EVALUATION_SAMPLES / job.machine.world_size)
    forwards, batch = 1, share
    if job.program.capture == "off":
        forwards, batch = math.ceil(share / _EVALUATION_BATCH), min(share, _EVALUATION_BATCH)
    rows: Software = job.program
    work = even_workload(1, batch, _MEAN_TOKENS, _MEAN_MASKED, rows)
    timing = simulate_step(job, work, np.ones(1))
    last = next(i for i, phase in enumerate(timing.phases) if phase.direction == "backward")
    sums_ms = _EVALUATION_COLLECTIVES * job.network.all_reduce_ms(4)
    reads_ms = _HOST_READS * job.constants.sync_us / 1e3
    return forwards * float(timing.ends[last - 1, 0]) + sums_ms + reads_ms
