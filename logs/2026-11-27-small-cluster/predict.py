"""What `plan cluster` predicts for the small cluster, from a calibration apart from the arms.

The step is simulated by the program's own code (bert_tools/plan/cluster/step.py). Here it is only
told of another model, another network and another speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bert_tools.plan.cluster.device import Phase, SentBucket
from bert_tools.plan.cluster.machine import (
    Constants,
    Machine,
    Network,
    accelerators,
    default_constants,
    programs,
)
from bert_tools.plan.cluster.step import Job, StepTiming, simulate_step
from bert_tools.plan.cluster.workload import Workload
from phases import BACKWARD, phase_shares

COLLECTIVES = ("reduce", "scatter", "gather", "nested")
UPDATE_BYTES = programs()["ours"].optimizer_bytes + 4  # zeroing included
CLIP_BYTES = 12  # three passes over a gradient


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a collective by bytes, [bytes, seconds] pairs, as they were measured."""

    points: Sequence[Sequence[float]]

    def ms(self, num_bytes: float) -> float:
        """Milliseconds: on the line between two points, beyond the last on that of the last two."""
        sizes, seconds = np.array(self.points, dtype=np.float64).T
        beyond = max(num_bytes - sizes[-1], 0) * (seconds[-1] - seconds[-2])
        beyond /= sizes[-1] - sizes[-2]
        return 1e3 * float(np.interp(num_bytes, sizes, seconds) + beyond)


@dataclass(frozen=True, slots=True)
class MeasuredNetwork(Network):
    """Collectives as long as they were measured to be while nothing else ran."""

    times: Mapping[str, Times] = field(default_factory=dict)
    is_nested: bool = False  # scattered in each host, then reduced between hosts

    def all_reduce_ms(self, num_bytes: float) -> float:
        """As measured."""
        return self.times["nested" if self.is_nested else "reduce"].ms(num_bytes)

    def reduce_scatter_ms(self, num_bytes: float) -> float:
        """As measured."""
        return self.times["scatter"].ms(num_bytes)

    def all_gather_ms(self, num_bytes: float) -> float:
        """As measured over all ranks."""
        return self.times["gather"].ms(num_bytes)

    def all_gather_in_node_ms(self, num_bytes: float) -> float:
        """Ranks of a host talk past its port: taken as the start of a gather over all ranks."""
        return self.times["gather"].ms(0) if self.machine.gpus_per_node > 1 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredJob(Job):
    """A job of the small cluster."""

    times: Mapping[str, Times]
    sent: tuple[SentBucket, ...]
    ms_per_token: float
    other_ms: float  # of a step beside sleeping and the update
    shares: tuple[float, ...]

    @property
    def network(self) -> Network:
        """The network as calibrated."""
        is_nested = self.program.sharding == "node"
        return MeasuredNetwork(self.machine, self.constants, times=self.times, is_nested=is_nested)

    @property
    def buckets(self) -> tuple[SentBucket, ...]:
        """The arm's own buckets."""
        return self.sent

    def phases(self, work: Workload) -> list[Phase]:
        """Embeddings, layers, heads; then backwards. What is done beside them is spread evenly."""
        more = self.other_ms / (2 * len(self.shares))
        whole = self.ms_per_token / (1 + BACKWARD) * work.tokens
        forward = [
            Phase(f"phase {number}", "forward", whole * share + more, 0)
            for number, share in enumerate(self.shares)
        ]
        backward = [
            replace(each, direction="backward", device_ms=BACKWARD * (each.device_ms - more) + more)
            for each in forward[::-1]
        ]
        return [*forward, *backward]


def job_of(record: dict[str, Any], arm: str) -> MeasuredJob:
    """The job of one arm of a record."""
    calibration, settings = record["calibration"], record["arms"][arm].get("set", {})
    per_token, other_ms, update_ms = speed_of(calibration, record)
    num_bytes = sum(size for size, _ in record["buckets"][arm])
    sharding = settings.get("parallel.data_parallel", "flat").removeprefix("shard_")
    program = replace(
        programs()["ours"],
        layout="unpadded",
        capture="off",
        optimizer_kernels=0,
        zeroing_kernels=0,
        sharding="none" if sharding == "flat" else sharding,
    )
    moved = UPDATE_BYTES * num_bytes / 4
    # Of an accelerator only the memory's rate is asked for here.
    speed = replace(accelerators()["a100"], memory_gb_s=moved / update_ms / 1e6)
    return MeasuredJob(
        machine=Machine(
            accelerator=speed,
            nodes=record["nodes"],
            gpus_per_node=record["ranks"] // record["nodes"],
            node_gb_s=record["bits_per_s"] / 8e9,
        ),
        program=program,
        constants=constants(),
        precision="fp32",
        clip=settings.get("clip.policy", "whole_before_allreduce"),
        times={name: Times(calibration[name]) for name in COLLECTIVES},
        sent=tuple(SentBucket(size, phase, 1.0) for size, phase in record["buckets"][arm]),
        ms_per_token=per_token,
        other_ms=other_ms,
        shares=tuple(phase_shares(record["model"])),
    )


def constants() -> Constants:
    """The simulator's, without what a sleeping rank does not have."""
    return replace(
        default_constants(),
        kernel_overhead_us=0.0,
        memory_efficiency=1.0,
        jitter_fraction=0.0,
        overlap_slowdown=0.0,
        host_launch_us=0.0,
    )


def speed_of(calibration: dict[str, Any], record: dict[str, Any]) -> tuple[float, float, float]:
    """ms a token, ms of a step beside that, and ms of the update, from steps that sent nothing.

    They clip the whole gradient, as the simulator's steps do, so that is taken off.
    """
    alone = calibration["alone"]
    tokens, whole, update = ([step[key] for step in alone] for key in ("tokens", "step", "update"))
    update_ms, per_token = float(np.median(update)), record["ms_per_token"]
    both_ms = update_ms * (1 + CLIP_BYTES / UPDATE_BYTES)
    if record["compute"] == "real":
        columns = np.column_stack([tokens, np.ones(len(tokens))])
        (per_token, other_ms), *_ = np.linalg.lstsq(columns, np.array(whole), rcond=None)
        return float(per_token), max(float(other_ms) - both_ms, 0.0), update_ms
    other = np.array(whole) - per_token * np.array(tokens)
    return per_token, float(np.median(other)) - both_ms, update_ms


def predicted(record: dict[str, Any], arm: str) -> list[list[StepTiming]]:
    """The simulated steps of an arm, by block, of the same tokens as the measured ones."""
    job = job_of(record, arm)
    return [
        [
            simulate_step(job, work_of(record, arm, tokens), np.ones(record["ranks"]))
            for tokens in each
        ]
        for each in record["blocks"][arm]["tokens"]
    ]


def work_of(record: dict[str, Any], arm: str, tokens: list[int]) -> Workload:
    """The work of a step: tokens [ranks]; an exchange in the step brings all ranks' samples."""
    counts = np.array(tokens, dtype=np.float64)
    work = Workload(counts, counts, counts, counts, counts)
    if record["arms"][arm].get("in_step"):
        others = record["ranks"] - 1
        whole = record["blocks"][arm]["received"] * record["ranks"] / others
        return replace(work, input_bytes=whole, input_scope="world")
    return work
