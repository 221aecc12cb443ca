"""The simulator beside published runs, and its few fitted constants fitted again.

.venv/bin/python logs/2026-11-22-cluster-model/calibrate.py [--fit]
"""

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from scipy.optimize import least_squares

from bert_tools.common.length_histogram import wikipedia_lengths
from bert_tools.common.tables import aligned
from bert_tools.plan.cluster.machine import (
    AcceleratorName,
    Constants,
    MatrixPrecision,
    Software,
    constant_rows,
    default_constants,
    make_machine,
    programs,
)
from bert_tools.plan.cluster.simulation import RunTime, run_time, simulate_steps
from bert_tools.plan.cluster.step import Job
from bert_tools.plan.cluster.workload import Dealing, Float64Array, Workload, draw_steps
from bert_tools.plan.sample_index import SampleIndex
from bert_tools.plan.samples_to_target import Estimate, samples_to_target
from mlperf_bert.config.sections import BalancePolicy, ClipPolicy, SamplerName

DRAWS = 5
GOAL = 0.15  # of a class: error that is still called good
IS_POINT = 1e-3  # of the samples: closer than published ones are rounded
_NUDGE = 0.1  # of a constant, where its weight is shown

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
    def global_batch_size(self) -> int:
        """Sequences a step."""
        return self.world_size * self.dealing.sequences(self.program.layout)

    def run_time(self, constants: Constants) -> RunTime:
        """The run that it is, simulated with these constants."""
        job = self.job(constants)
        return run_time(
            job,
            simulate_steps(job, published_works(self.id)),
            global_batch_size=self.global_batch_size,
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
    text = Path(__file__).with_name("published_steps.csv").read_text("utf-8")
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
    run = step.run_time(constants)
    if step.measure == "steady":
        return Compared(step, run.steady_step_ms)
    return Compared(step, 1e3 * run.seconds / (step.samples / step.global_batch_size))


def fit(constants: Constants, steps: Sequence[PublishedStep]) -> tuple[Constants, float]:
    """Fitted constants by least squares of the errors' logarithms, and the mean that is left.

    The search starts in the middle of the bounds, wherever the constants are, and stays within
    them. Deterministic.
    """
    rows = [row for row in constant_rows() if row.kind == "fitted"]
    low, width = np.array([(row.low, row.high - row.low) for row in rows]).T

    def at(share: Float64Array) -> Constants:
        found = constants
        for row, value in zip(rows, (low + width * share).tolist(), strict=True):
            found = replace(found, **{row.name: value})
        return found

    found = least_squares(
        lambda share: log_errors(at(share), steps), np.full(len(rows), 0.5), bounds=(0.0, 1.0)
    )
    return at(found.x), math.sqrt(float(np.mean(found.fun**2)))


def log_errors(constants: Constants, steps: Sequence[PublishedStep]) -> Float64Array:
    """ln(predicted / published) of each class, float64 [n]."""
    return np.array([math.log1p(compare(step, constants).error) for step in steps])


@cache
def _wikipedia() -> SampleIndex:
    return SampleIndex.of_histogram(wikipedia_lengths(), "Wikipedia's lengths")


def _published_step(row: dict[str, str]) -> PublishedStep:
    program = programs()[row["program"]]
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
            deal=cast(Literal["snake", "one_direction"], row["deal"]),
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


def main(words: Sequence[str]) -> None:
    """Print the table of errors, fitted and held-out classes apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants again (seconds)")
    args = parser.parse_args(words)
    constants, steps = default_constants(), published_steps()
    report: list[str] = []
    if args.fit:
        constants, left = fit(constants, [step for step in steps if step.role == "fitted"])
        report = [f"root mean square error {left:.4f}"]
    compared = [compare(step, constants) for step in steps]
    print("\n".join(_in_words(constants, compared, report)))


def sensitivity(constants: Constants, steps: Sequence[PublishedStep]) -> list[dict[str, Any]]:
    """By how much every step changes where one constant is a tenth larger."""
    before = [compare(step, constants).predicted_ms for step in steps]
    found = []
    for row in constant_rows():
        larger = replace(constants, **{row.name: (1 + _NUDGE) * getattr(constants, row.name)})
        after = [compare(step, larger).predicted_ms for step in steps]
        changes = {
            step.id: new / old - 1 for step, new, old in zip(steps, after, before, strict=True)
        }
        found.append({"constant": row.name, "changes": changes})
    return found


def expected(published: PublishedStep) -> Estimate:
    """What the recipe's published points say of this batch."""
    recipe = "open_adam" if published.program.optimizer == "adam" else "closed_lamb"
    return samples_to_target(published.global_batch_size, recipe)


def is_point(published: PublishedStep, estimate: Estimate) -> bool:
    """Whether the class is itself the recipe's point, so that its samples test nothing."""
    error = estimate.samples / published.samples - 1
    return abs(error) < IS_POINT and estimate.source.startswith(published.submitter)


def time_errors(compared: Sequence[Compared]) -> list[float]:
    """Of step x samples over published, less one: held-out classes that are no points."""
    errors = []
    for each in compared:
        estimate = expected(each.published)
        if each.published.role == "held_out" and not is_point(each.published, estimate):
            errors.append((1 + each.error) * estimate.samples / each.published.samples - 1)
    return errors


def _samples_error(published: PublishedStep, estimate: Estimate) -> str:
    if is_point(published, estimate):
        return "a point"
    return f"{estimate.samples / published.samples - 1:+.1%}"


def _in_words(constants: Constants, compared: list[Compared], report: list[str]) -> list[str]:
    values = [
        (
            row.name,
            f"{getattr(constants, row.name):.4g}",
            f"{row.low:g} .. {row.high:g}",
            row.unit,
            row.kind,
        )
        for row in constant_rows()
    ]
    lines = [
        *report,
        *aligned(("constant", "value", "bounds", "unit", "kind"), values, left="constant"),
        "",
    ]
    names = ("class", "role", "published", "simulated", "error", "samples", "expected", "error")
    cells = []
    for each in compared:
        samples, published = expected(each.published), each.published
        cells.append(
            (
                f"{published.id} ({published.round})",
                published.role.replace("_", " "),
                f"{published.step_ms:.1f} ms",
                f"{each.predicted_ms:.1f} ms",
                f"{each.error:+.1%}" + (" !" if abs(each.error) > GOAL else "  "),
                f"{published.samples / 1e6:.2f} M",
                f"{samples.samples / 1e6:.2f} M",
                _samples_error(published, samples),
            )
        )
    lines += aligned(names, cells, left="class")
    for role in ("fitted", "held_out", "other"):
        errors = [abs(each.error) for each in compared if each.published.role == role]
        good = sum(error <= GOAL for error in errors)
        lines.append(
            f"{role.replace('_', ' ')}: {good} of {len(errors)} within {GOAL:.0%}, "
            f"mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}"
        )
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
