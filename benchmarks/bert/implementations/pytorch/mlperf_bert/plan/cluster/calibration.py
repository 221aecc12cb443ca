"""Published steps against simulated ones, and the fit of the few constants that are fitted."""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import product
from typing import Literal, cast

from mlperf_bert.config_sections import BalancePolicy, ClipPolicy, Deal, ModelSection, SamplerName
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.plan.cluster.constants import Constants, constant_rows
from mlperf_bert.plan.cluster.machine import AcceleratorName, MatrixPrecision, make_machine
from mlperf_bert.plan.cluster.run import RunInputs, mean_step_ms, run_time, simulate_steps
from mlperf_bert.plan.cluster.software import Software, SoftwareName, software
from mlperf_bert.plan.cluster.step import Job
from mlperf_bert.plan.cluster.workload import Dealing, Workload, draw_steps
from mlperf_bert.plan.sample_index import SampleIndex

DRAWS = 5
MAX_PREDICTIONS = 76
_FIRST_STRIDE, _LAST_STRIDE = 0.25, 0.0005  # of a constant's bounds


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
    """Fitted constants by compass search: the least mean square of the errors' logarithms.

    The search starts in the middle of the bounds, wherever the constants are. Each constant, and
    each pair of them (the least lies in a narrow valley), is moved by a stride up and down within
    its bounds; where nothing helps, the stride is halved. Deterministic; needs no library.
    """
    rows = [row for row in constant_rows() if row.kind == "fitted"]
    for row in rows:
        constants = constants.with_value(row.name, (row.low + row.high) / 2)
    best, stride = squared_error(constants, steps), _FIRST_STRIDE
    while stride > _LAST_STRIDE:
        improved = False
        for move in _moves(len(rows)):
            tried = constants
            for row, sign in zip(rows, move, strict=True):
                moved = getattr(constants, row.name) + sign * stride * (row.high - row.low)
                tried = tried.with_value(row.name, min(max(moved, row.low), row.high))
            error = squared_error(tried, steps)
            if error < best:
                constants, best, improved = tried, error, True
        report(f"stride {stride:.4f} of the bounds: root mean square error {math.sqrt(best):.4f}")
        if not improved:
            stride /= 2
    return constants


def _moves(count: int) -> list[tuple[int, ...]]:
    """Up, down or not at all for each of `count` constants, one or two of them at a time."""
    moves = product((0, 1, -1), repeat=count)
    return [move for move in moves if 1 <= sum(map(abs, move)) <= 2]


def squared_error(constants: Constants, steps: Sequence[PublishedStep]) -> float:
    """Mean square of ln(predicted / published)."""
    errors = [math.log1p(compare(step, constants).error) ** 2 for step in steps]
    return sum(errors) / len(errors)


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
