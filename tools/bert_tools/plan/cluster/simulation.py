"""Simulation of a step and a run."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from bert_tools.plan.cluster.machine import (
    AcceleratorName,
    Constants,
    MatrixPrecision,
    Scope,
    default_constants,
    make_machine,
)
from bert_tools.plan.cluster.step import Job, StepTiming, jitter, simulate_step
from bert_tools.plan.cluster.workload import Workload, draw_steps, even_workload
from bert_tools.plan.sample_index import SampleIndex
from bert_tools.plan.samples_to_target import Estimate, Recipe, samples_to_target
from mlperf_bert.config.sections import BalancePolicy, ClipPolicy, CountsPerRank, SamplerName
from mlperf_bert.distributed.bucket_plan import DEFAULT_CAP_MB
from mlperf_bert.errors import ConfigError

MOST_RANKS = 200_000  # ranks of a step, and of all its draws together
DRAWS = 5  # steps of a question, fewer for very many ranks
_LEAST_GB_S, _MOST_GB_S = 0.01, 1e6
_EVALUATION_SAMPLES = 10_000
_EVALUATION_BATCH = 16
_MEAN_TOKENS, _MEAN_MASKED = 256, 38
_EVALUATION_COLLECTIVES = 3  # correct, masked, loss
_HOST_READS = 2  # of an evaluation's sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One machine, program and recipe, named as in the config and the options."""

    nodes: int
    gpus_per_node: int
    local_batch_size: int
    grad_accum_steps: int = 1
    accelerator: AcceleratorName = "a100"
    node_gb_s: float | None = None
    capture: Literal["on", "off"] = "on"
    sharding: Scope = "none"
    precision: MatrixPrecision = "bf16"
    sampler: SamplerName = "uniform"
    balance: BalancePolicy = "presort_global"
    counts: CountsPerRank = "equal"
    clip: ClipPolicy = "after_allreduce"
    bucket_cap_mb: float = DEFAULT_CAP_MB
    recipe: Recipe = "closed_lamb"
    evaluation_interval: int | None = None  # samples; None: by the rules

    def __post_init__(self) -> None:
        if self.world_size > MOST_RANKS:
            problem = f"makes {self.world_size:,} ranks"
            raise ConfigError("parallel.nodes", problem, f"keep them to {MOST_RANKS:,}")
        machine = make_machine(self.accelerator, 1, 1)
        if not machine.accelerator.peak_tflops(self.precision):
            problem = f"{self.precision}: {self.accelerator} has no such units"
            raise ConfigError("model.precision", problem, "use bf16, or another accelerator")
        if self.node_gb_s is not None and not _LEAST_GB_S <= self.node_gb_s <= _MOST_GB_S:
            problem = f"is {self.node_gb_s:g}"
            remedy = f"set it within {_LEAST_GB_S:g} .. {_MOST_GB_S:g} GB/s"
            raise ConfigError("--node-bandwidth", problem, remedy)

    @property
    def world_size(self) -> int:
        """Accelerators in the whole job."""
        return self.nodes * self.gpus_per_node

    @property
    def global_batch_size(self) -> int:
        """Sequences a step."""
        return self.world_size * self.local_batch_size * self.grad_accum_steps

    def job(self, constants: Constants) -> Job:
        """The job for the simulator."""
        return Job(
            machine=make_machine(self.accelerator, self.nodes, self.gpus_per_node, self.node_gb_s),
            constants=constants,
            precision=self.precision,
            clip=self.clip,
            bucket_cap_mb=self.bucket_cap_mb,
            capture=self.capture,
            sharding=self.sharding,
            optimizer="lamb" if self.recipe == "closed_lamb" else "adam",
        )

    def works(self, index: SampleIndex) -> list[Workload]:
        """Drawn steps; fewer for very many ranks."""
        return draw_steps(
            index,
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            draws=max(1, min(DRAWS, MOST_RANKS // self.world_size)),
            local_batch_size=self.local_batch_size,
            grad_accum_steps=self.grad_accum_steps,
            sampler=self.sampler,
            balance=self.balance,
            counts=self.counts,
            is_captured=self.capture == "on",
        )

    def estimate(self) -> Estimate:
        """Samples to the target, as the recipe needs at this batch."""
        return samples_to_target(self.global_batch_size, self.recipe)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTime:
    """Parts of a run's time; `step_ms` is the mean over drawn steps."""

    step_ms: float
    steps: int
    evaluations: int
    evaluation_ms: float

    @property
    def seconds(self) -> float:
        """Seconds from the first step to the target."""
        return (self.steps * self.step_ms + self.evaluations * self.evaluation_ms) / 1e3


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Drawn steps of one question, and the run that they make up."""

    question: Question
    timings: list[StepTiming]
    works: list[Workload]
    run: RunTime
    estimate: Estimate

    @property
    def sequences_per_s(self) -> float:
        """Sequences per second of steps, without evaluations and start-up."""
        return 1e3 * self.question.global_batch_size / self.run.step_ms

    @property
    def imbalance_tokens(self) -> float:
        """Largest over mean of the ranks' real tokens, averaged over draws."""
        each = [float(work.real_tokens.max() / work.real_tokens.mean()) for work in self.works]
        return sum(each) / len(each)

    @property
    def padding_fraction(self) -> float:
        """Ratio of padding tokens to real ones."""
        real = sum(float(work.real_tokens.sum()) for work in self.works)
        return sum(float(work.tokens.sum()) for work in self.works) / real - 1

    @property
    def parts_ms(self) -> dict[str, float]:
        """Parts of a step on the mean rank, ms; their sum is the step."""
        return {
            name: sum(float(timing.parts[name].mean()) for timing in self.timings)
            / len(self.timings)
            for name in self.timings[0].parts
        }

    def mean_ms(self, name: Literal["communication_ms", "exposed_ms"]) -> float:
        """Mean of a property of the steps over draws."""
        return sum(float(getattr(timing, name)) for timing in self.timings) / len(self.timings)


def simulate(
    question: Question, index: SampleIndex, constants: Constants | None = None
) -> Simulated:
    """Drawn steps and the run they make up. Raises ConfigError if the batch cannot be drawn."""
    works = question.works(index)
    return timed(question, works, constants or default_constants())


def timed(question: Question, works: list[Workload], constants: Constants) -> Simulated:
    """Time steps that were drawn before, each with its own jitter; see `simulate`."""
    job, estimate = question.job(constants), question.estimate()
    timings = []
    for number, work in enumerate(works):
        speed = jitter(work.world_size, constants.jitter_fraction, number)
        timing = simulate_step(job, work, speed)
        earlier_ms = (question.grad_accum_steps - 1) * timing.forward_ms
        timings.append(replace(timing, earlier_ms=earlier_ms))
    batch = question.global_batch_size
    interval = question.evaluation_interval or evaluation_interval(batch)
    run = RunTime(
        step_ms=float(np.mean([timing.step_ms for timing in timings])),
        steps=math.ceil(estimate.samples / batch),
        evaluations=max(1, math.floor(estimate.samples / interval)),  # including the last one
        evaluation_ms=evaluation_ms(job),
    )
    return Simulated(question=question, timings=timings, works=works, run=run, estimate=estimate)


def evaluation_interval(global_batch_size: int) -> int:
    """Samples between two evaluations by the rules' formula (section 7)."""
    return int(0.05 * (230.23 * global_batch_size + 3_000_000)) // 25_000 * 25_000


def evaluation_ms(job: Job) -> float:
    """One evaluation: forwards over a rank's share of the held-out samples, then three sums."""
    share = math.ceil(_EVALUATION_SAMPLES / job.machine.world_size)
    forwards, batch = 1, share
    if job.capture == "off":
        forwards, batch = math.ceil(share / _EVALUATION_BATCH), min(share, _EVALUATION_BATCH)
    work = even_workload(1, batch, _MEAN_TOKENS, _MEAN_MASKED)
    timing = simulate_step(job, work, np.ones(1))
    last = next(i for i, phase in enumerate(timing.phases) if phase.direction == "backward")
    sums_ms = _EVALUATION_COLLECTIVES * job.network.all_reduce_ms(4)
    reads_ms = _HOST_READS * job.constants.sync_us / 1e3
    return forwards * float(timing.ends[last - 1, 0]) + sums_ms + reads_ms
