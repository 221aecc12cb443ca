"""Published steps against simulated ones, and the fit of the few constants that are fitted."""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Literal, cast

import numpy as np

from bert_tools.plan.cluster.constants import Constants, constant_rows
from bert_tools.plan.cluster.machine import AcceleratorName, MatrixPrecision, make_machine
from bert_tools.plan.cluster.run import RunInputs, mean_step_ms, run_time, simulate_steps
from bert_tools.plan.cluster.software import Software, SoftwareName, software
from bert_tools.plan.cluster.step import Job
from bert_tools.plan.cluster.workload import Dealing, Float64Array, Workload, draw_steps
from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.config.sections import (
    BalancePolicy,
    ClipPolicy,
    Deal,
    ModelSection,
    SamplerName,
)
from mlperf_bert.data.length_histogram import wikipedia_lengths

DRAWS = 5
MAX_PREDICTIONS = 76
_NUDGE = 1e-3  # of a constant's bounds, for its slope
_FIRST_DAMPING, _MOST_DAMPING = 1e-3, 1e6
_MOST_ROUNDS, _LEAST_GAIN = 40, 1e-10


Role = Literal["fitted", "held_out", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedStep:
    """A row of `published_steps.csv`: a class of entries, and how long its step took."""

    id: str
    submitter: str
    round: str
    accelerator: AcceleratorName
    nodes: int
    gpus_per_node: int
    network_gb_s: float
    dealing: Dealing
    precision: MatrixPrecision
    program: Software
    clip: ClipPolicy
    samples: float
    step_ms: float
    measure: Literal["run", "steady"]
    start_up_s: float
    skipped_steps: int
    role: Role

    @property
    def world_size(self) -> int:
        """Accelerators."""
        return self.nodes * self.gpus_per_node

    @property
    def run_inputs(self) -> RunInputs:
        """What the run's time needs beside its steps."""
        return RunInputs(
            global_batch_size=self.world_size * self.dealing.sequences(self.program.layout),
            samples=self.samples,
            start_up_s=self.start_up_s,
            skipped_steps=self.skipped_steps,
        )

    def job(self, constants: Constants) -> Job:
        """As the simulator takes it."""
        machine = make_machine(self.accelerator, self.nodes, self.gpus_per_node, self.network_gb_s)
        return Job(
            machine=machine,
            program=self.program,
            constants=constants,
            model=ModelSection(),
            precision=self.precision,
            clip=self.clip,
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """A published class beside what the simulator gives for it, ms a step."""

    published: PublishedStep
    predicted_ms: float

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted_ms / self.published.step_ms - 1


@cache
def published_steps() -> tuple[PublishedStep, ...]:
    """All rows of `published_steps.csv`, in its order."""
    text = resources.files(__package__).joinpath("published_steps.csv").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(_published_step(row) for row in csv.DictReader(lines))


@cache
def published_works(rank_id: str) -> tuple[Workload, ...]:
    """Drawn steps of the class with this id: the same for every set of constants."""
    step = next(each for each in published_steps() if each.id == rank_id)
    return tuple(
        draw_steps(_wikipedia(), step.dealing, step.program, step.nodes, step.gpus_per_node, DRAWS)
    )


def compare(step: PublishedStep, constants: Constants) -> Compared:
    """Simulate a class as it is measured: a steady step, or the whole run over its steps."""
    job = step.job(constants)
    mean_ms = mean_step_ms(simulate_steps(job, published_works(step.id)))
    run = run_time(job, mean_ms, step.run_inputs)
    if step.measure == "steady":
        return Compared(step, run.steady_step_ms)
    return Compared(step, 1e3 * run.seconds / (step.samples / step.run_inputs.global_batch_size))


def fit(
    constants: Constants, steps: Sequence[PublishedStep], report: Callable[[str], None]
) -> Constants:
    """Fitted constants by damped least squares of the errors' logarithms (Levenberg, Marquardt).

    The search starts in the middle of the bounds, wherever the constants are, and stays within
    them. Deterministic.
    """
    rows = [row for row in constant_rows() if row.kind == "fitted"]
    low, width = np.array([(row.low, row.high - row.low) for row in rows]).T

    def at(share: Float64Array) -> Constants:
        found = constants
        for row, value in zip(rows, (low + width * share).tolist(), strict=True):
            found = found.with_value(row.name, value)
        return found

    share, damping = np.full(len(rows), 0.5), _FIRST_DAMPING
    errors = log_errors(at(share), steps)
    for number in range(_MOST_ROUNDS):
        moved = [log_errors(at(share + _NUDGE * one), steps) for one in np.eye(len(rows))]
        slopes = (np.array(moved) - errors).T / _NUDGE
        normal = slopes.T @ slopes + damping * np.eye(len(rows))
        tried = np.clip(share - np.linalg.solve(normal, slopes.T @ errors), 0.0, 1.0)
        tried_errors = log_errors(at(tried), steps)
        gain = float(errors @ errors - tried_errors @ tried_errors)
        if gain > 0:
            share, errors, damping = tried, tried_errors, damping / 3
        else:
            damping *= 4
        report(f"round {number + 1}: root mean square error {_root_mean_square(errors):.4f}")
        if 0 < gain < _LEAST_GAIN or damping > _MOST_DAMPING:
            break
    return at(share)


def log_errors(constants: Constants, steps: Sequence[PublishedStep]) -> Float64Array:
    """ln(predicted / published) of each class, float64 [n]."""
    return np.array([math.log1p(compare(step, constants).error) for step in steps])


def _root_mean_square(errors: Float64Array) -> float:
    return math.sqrt(float(errors @ errors) / len(errors))


@cache
def _wikipedia() -> SampleIndex:
    return SampleIndex.of_histogram(wikipedia_lengths(), "Wikipedia's lengths", MAX_PREDICTIONS)


def _published_step(row: dict[str, str]) -> PublishedStep:
    program = software(cast(SoftwareName, row["program"]))
    reduction: Literal["on", "off"] = "on" if row["in_network_reduction"] == "on" else "off"
    return PublishedStep(
        id=row["id"],
        submitter=row["submitter"],
        round=row["round"],
        accelerator=cast(AcceleratorName, row["accelerator"]),
        nodes=int(row["nodes"]),
        gpus_per_node=int(row["gpus_per_node"]),
        network_gb_s=float(row["network_gb_s"]),
        dealing=Dealing(
            local_batch_size=int(row["local_batch"]),
            sampler=cast(SamplerName, row["sampler"]),
            balance=cast(BalancePolicy, row["balance"]),
            deal=cast(Deal, row["deal"]),
        ),
        precision=cast(MatrixPrecision, row["precision"]),
        program=replace(program, in_network_reduction=reduction),
        clip=cast(ClipPolicy, row["clip"]),
        samples=float(row["samples"]),
        step_ms=float(row["step_ms"]),
        measure="steady" if row["measure"] == "steady" else "run",
        start_up_s=float(row["start_up_s"]),
        skipped_steps=int(row["skipped_steps"]),
        role=cast(Role, row["role"]),
    )
