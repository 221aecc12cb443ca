"""Simulates a config's step on a machine and forecasts its time to train, for `plan cluster`.

The forecast multiplies a simulated step's time by the number of steps that a recipe needs. Its
range combines two uncertainties: the bounds of the simulator's assumed constants, and the spread of
the published samples to target.
"""

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from bert_tools.common.results import aligned
from bert_tools.plan.buckets import ELEMENT_BYTES
from bert_tools.plan.cluster.machine import (
    ACCELERATORS,
    AcceleratorName,
    Constants,
    Scope,
    constant_rows,
    default_constants,
    make_machine,
)
from bert_tools.plan.cluster.step import Job, StepTiming, jitter, simulate_step
from bert_tools.plan.cluster.workload import Workload, draw_steps, even_workload
from bert_tools.plan.entries import published_minutes
from bert_tools.plan.recipes import Estimate, Recipe, recipe_of, samples_to_target
from bert_tools.plan.sample_index import wikipedia_index
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import CLOSED_TARGET_ACCURACY, RunConfig
from mlperf_bert.config.sections import ModelSection, RunSection
from mlperf_bert.errors import ConfigError

MAX_RANKS = 200_000  # of a step, and of all drawn steps together
DRAWS = 5  # number of simulated steps, fewer for a very large number of ranks
_MIN_GB_S, _MAX_GB_S = 0.01, 1e6
_EVALUATION_SAMPLES = 10_000
_MEAN_TOKENS, _MEAN_MASKED = 256, 38
_EVALUATION_BATCH = 2**14 // _MEAN_TOKENS  # eager micro-batches have 2^14 tokens on a GPU
_EVALUATION_COLLECTIVES = 3  # sums of correct predictions, of masked tokens and of the loss
_HOST_READS = 2  # times that the host reads sums of an evaluation
_SLURM_FACTOR, _SLURM_START_MINUTES = 1.5, 5  # see minutes_allowed

# These errors are in the table `errors` of logs/2026-11-22-cluster-model/cluster_tables.py, and a
# test compares them with that table. The simulator of commit 616d0d8d computed them for published
# programs. The same formulas simulate our program here.
HELD_OUT = (
    "on held-out A100 runs the time to train (step x samples) is within 15% in 10 of 16 classes "
    "(mean error 12.0%), and the step in 17 of 19 (mean error 7.7%; 95% interval of the share: 67% "
    "to 99%; the step of the nearest published class instead: 10 of 19)"
)
_NOT_MODELLED = (
    "not modelled: faults, restarts, a shared or thinner network, reading of data, clocks that "
    "slow down with heat"
)
_NOTE = (
    "This is a simulation with constants fitted to published A100 runs. Our program has not run on "
    "a GPU."
)
_STEP_NAMES = ("part of a step (mean over ranks)", "time", "of the step")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTime:
    """The parts of a run's time: the numbers of steps and evaluations, and the time of each one.

    `step_ms` is the mean over the simulated steps.
    """

    step_ms: float
    steps: int
    evaluations: int
    evaluation_ms: float

    @property
    def seconds(self) -> float:
        """Return the time in seconds from the first step until the target is reached."""
        return (self.steps * self.step_ms + self.evaluations * self.evaluation_ms) / 1e3


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The simulated steps of a config, and the forecast of its whole run.

    `low` and `high` are the bounds of the run's time in seconds.
    """

    job: Job
    recipe: Recipe
    works: list[Workload]
    timings: list[StepTiming]
    run: RunTime
    estimate: Estimate
    low: float
    high: float

    @property
    def imbalance_tokens(self) -> float:
        """Return the most real tokens of a rank divided by the ranks' mean, averaged over steps."""
        each = [float(work.real_tokens.max() / work.real_tokens.mean()) for work in self.works]
        return sum(each) / len(each)

    @property
    def parts_ms(self) -> dict[str, float]:
        """Return the parts of a step in ms, averaged over ranks and simulated steps.

        The parts add up to the time of the step.
        """
        return {
            name: sum(float(timing.parts[name].mean()) for timing in self.timings)
            / len(self.timings)
            for name in self.timings[0].parts
        }

    def mean_ms(self, name: Literal["communication_ms", "exposed_ms"]) -> float:
        """Return the mean of the timings' property `name` over the simulated steps, in ms."""
        return sum(float(getattr(timing, name)) for timing in self.timings) / len(self.timings)


def answer(args: argparse.Namespace) -> tuple[dict[str, Any], Iterable[str]]:
    """Simulate the run of a config.

    Returns the facts for `--json` and the lines for the terminal. Raises ConfigError for a user's
    mistake.
    """
    config = load_config(args.config, args.set)
    found = simulate(config, args.config.stem, args.accelerator, args.node_gb_s)
    run = found.run
    facts = {
        "kind": "simulation",
        "accelerator": found.job.machine.accelerator.name,
        "node_gb_s": found.job.machine.node_gb_s,
        "recipe": found.recipe,
        "world_size": config.parallel.world_size,
        "global_batch_size": config.parallel.global_batch_size,
        "step_ms": run.step_ms,
        "parts_ms": found.parts_ms,
        "communication_ms": found.mean_ms("communication_ms"),
        "exposed_ms": found.mean_ms("exposed_ms"),
        "imbalance_tokens": found.imbalance_tokens,
        "run": asdict(run),
        "samples_to_target": asdict(found.estimate),
        "forecast": {"seconds": run.seconds, "low": found.low, "high": found.high},
        "published_minutes": _published(found),
        "slurm_minutes": minutes_allowed(run),
        "held_out": HELD_OUT,
    }
    lines = list(_in_words(config, found))
    lines.append(
        f"time limit of a SLURM job: {minutes_allowed(run)} minutes per run "
        f"(run.slurm_minutes is {config.run.slurm_minutes})"
    )
    if run.steps > config.max_steps:
        lines.append(
            f"warning: the run stops after {config.max_steps:,} steps, but it is expected to need "
            f"{run.steps:,}; increase run.max_steps"
        )
    if found.estimate.basis == "all steps" and config.eval.target_accuracy != "none":
        lines.append("warning: the run ends earlier if it reaches its target accuracy")
    return facts, lines


def simulate(
    config: RunConfig,
    origin: str,
    accelerator: AcceleratorName | None = None,
    node_gb_s: float | None = None,
) -> Simulated:
    """Simulate several steps of a config and forecast its run.

    `origin` is the config's name, which determines the accelerator if `accelerator` is None. The
    range treats the assumed constants as independent. Each constant's bounds change the run's time,
    and these changes are combined as the square root of the sum of their squares.

    Raises ConfigError if the simulator does not support the config, or if the sampler cannot draw
    its batch.
    """
    job = _job_of(config, origin, accelerator, node_gb_s)
    recipe = recipe_of(config)
    estimate = _samples_of(config)
    draws = max(1, min(DRAWS, MAX_RANKS // config.parallel.world_size))
    works = draw_steps(config, wikipedia_index(), draws)
    timings, run = _timed(config, job, works, estimate)

    def seconds(constants: Constants) -> float:
        """Return the run's time in seconds with the given constants.

        Only the first of the drawn steps is simulated.
        """
        return _timed(config, replace(job, constants=constants), works[:1], estimate)[1].seconds

    expected = seconds(job.constants)
    shorter, longer = [], []
    for row in constant_rows():
        if row.kind == "assumed":
            ends = (replace(job.constants, **{row.name: end}) for end in (row.low, row.high))
            shares = [seconds(constants) / expected - 1 for constants in ends]
            shorter.append(min(*shares, 0.0))
            longer.append(max(*shares, 0.0))
    return Simulated(
        job=job,
        recipe=recipe,
        works=works,
        timings=timings,
        run=run,
        estimate=estimate,
        low=run.seconds * (1 - math.hypot(*shorter)) * estimate.low / estimate.samples,
        high=run.seconds * (1 + math.hypot(*longer)) * estimate.high / estimate.samples,
    )


def minutes_allowed(run: RunTime) -> int:
    """Return the minutes that a SLURM job may take for one run, which are 1.5 x forecast + 5.

    The factor 1.5 is a margin. On held-out classes, the forecast of the time to train was off by up
    to 26% (docs/concepts/cluster_model.md), and a run that needs all steps of a shipped config of
    the closed division trains up to 1.4 times as long as forecast. The 5 minutes are for the start,
    whose time on many GPUs nobody has measured. NVIDIA's job for 128 nodes in v2.0 allowed 7
    minutes for a run of less than half a minute. The limits of the closed division are above the
    median published times on as many GPUs of the same kind, which are 0.9 to 1.9 times the
    forecasts.
    """
    return math.ceil(_SLURM_FACTOR * run.seconds / 60) + _SLURM_START_MINUTES


def slurm_minutes(
    config: RunConfig, origin: str, accelerator: AcceleratorName | None = None
) -> int:
    """Return the value of `run.slurm_minutes` for a config. `origin` is as in `simulate`.

    If the samples to target are known, the run is the one that `plan cluster` forecasts. Otherwise
    it has all steps of the config, because it may need them. Such a run is simulated as
    BERT-large with AdamW, because the simulator knows no other model and no Muon. The shipped
    models of BERT-base's size compute at most about 0.8 times as much per sequence, but in smaller
    matrices, so their limits are rough estimates. A config that does not require GPUs has the
    default. Raises ConfigError as `simulate` does.
    """
    if config.run.device != "cuda":
        return RunSection().slurm_minutes
    estimate = _samples_of(config)
    if estimate.basis == "all steps":
        config = replace(
            config,
            model=replace(ModelSection(), precision=config.model.precision),
            data=replace(config.data, max_seq_length=512),
            optim=replace(config.optim, name="adamw"),
        )
    job = _job_of(config, origin, accelerator, None)
    works = draw_steps(config, wikipedia_index(), DRAWS)
    return minutes_allowed(_timed(config, job, works, estimate)[1])


def _samples_of(config: RunConfig) -> Estimate:
    """Estimate the samples of a run: those to target if they are known, otherwise all.

    They are known for the accuracy, objective and masks of the published results, and not for Muon.
    """
    batch, target = config.parallel.global_batch_size, config.eval.target_accuracy
    is_published = target == CLOSED_TARGET_ACCURACY and config.model.objective == "mlm_nsp"
    is_published &= config.data.masking == "static"
    if is_published and config.optim.name != "muon":
        return samples_to_target(batch, recipe_of(config))
    samples = config.max_steps * batch
    reason = "is published for this optimizer, target accuracy, objective and masking"
    source = "there is no target accuracy" if target == "none" else f"no result {reason}"
    return Estimate(samples, samples, samples, source, "all steps")


def _job_of(
    config: RunConfig, origin: str, accelerator: AcceleratorName | None, node_gb_s: float | None
) -> Job:
    """Return the simulator's description of a config's program and machine.

    Raises ConfigError for a run on a CPU, for a model other than BERT-large, and for lengths,
    kernels, optimizers or machines that the simulator does not support.
    """
    model, parallel, usual = config.model, config.parallel, ModelSection()
    shape = ("architecture", "num_layers", "hidden_size", "intermediate_size", "num_heads")
    if config.run.device == "cpu" or any(getattr(model, n) != getattr(usual, n) for n in shape):
        problem = "does not train BERT-large on GPUs, the only case that can be simulated"
        raise ConfigError(origin, problem, "pass another config, such as dgxa100_8x8x48x1")
    if config.data.max_seq_length != 512 or model.kernels == "reference":
        problem = "uses reference kernels or a sequence length other than 512, which is unsupported"
        remedy = "set data.max_seq_length to 512 and model.kernels to auto"
        raise ConfigError(origin, problem, remedy)
    if config.optim.name == "muon":
        problem = "is 'muon', but no published result says how many samples it needs"
        raise ConfigError("optim.name", problem, "use another optimizer")
    if parallel.world_size > MAX_RANKS:
        problem = f"results in {parallel.world_size:,} ranks"
        raise ConfigError("parallel.nodes", problem, f"use at most {MAX_RANKS:,} ranks")
    if node_gb_s is not None and not _MIN_GB_S <= node_gb_s <= _MAX_GB_S:
        remedy = f"set --node-bandwidth to a rate from {_MIN_GB_S:g} to {_MAX_GB_S:g} GB/s"
        raise ConfigError("--node-bandwidth", f"is {node_gb_s:g}", remedy)
    in_name: list[AcceleratorName] = [each for each in ACCELERATORS[::-1] if each in origin]
    name = accelerator or [*in_name, ACCELERATORS[0]][0]
    machine = make_machine(name, parallel.nodes, parallel.ranks_per_node, node_gb_s)
    precision = "bf16" if model.precision == "bf16_autocast" else model.precision
    if not machine.accelerator.peak_tflops(precision):
        problem = f"is {precision}, which the accelerator {name} does not support"
        raise ConfigError("model.precision", problem, "use bf16, or another --accelerator")
    element_bytes = ELEMENT_BYTES.get(model.precision, 4)  # autocast has fp32 gradients
    shards: dict[str, Scope] = {"zero1_node": "node", "zero1": "world"}
    return Job(
        machine=machine,
        constants=default_constants(),
        precision=precision,
        element_bytes=element_bytes,
        sent_fraction=2 / element_bytes if parallel.allreduce_dtype == "bf16" else 1.0,
        clip=config.clip.policy,
        bucket_cap_mb=parallel.bucket_cap_mb,
        capture="on" if config.run.step_mode == "captured" else "off",
        sharding=shards.get(parallel.data_parallel, "none"),
        optimizer="lamb" if recipe_of(config) == "closed_lamb" else "adam",
    )


def _timed(
    config: RunConfig, job: Job, works: Sequence[Workload], estimate: Estimate
) -> tuple[list[StepTiming], RunTime]:
    """Simulate the steps of `works`, each with its own jitter, and compute the run's time.

    Returns the timing of each step, and the parts of the run's time.
    """
    timings = []
    for number, work in enumerate(works):
        speed = jitter(work.world_size, job.constants.jitter_fraction, number)
        timing = simulate_step(job, work, speed)
        earlier_ms = (config.parallel.grad_accum_steps - 1) * timing.forward_ms
        timings.append(replace(timing, earlier_ms=earlier_ms))
    including_last = math.floor(estimate.samples / config.eval_interval_samples)
    return timings, RunTime(
        step_ms=float(np.mean([timing.step_ms for timing in timings])),
        steps=math.ceil(estimate.samples / config.parallel.global_batch_size),
        evaluations=max(1, including_last),
        evaluation_ms=evaluation_ms(job),
    )


def evaluation_ms(job: Job) -> float:
    """Return the time of one evaluation in ms.

    An evaluation consists of forward passes over the rank's share of the held-out samples, and of
    three all-reduces over the ranks.
    """
    share = math.ceil(_EVALUATION_SAMPLES / job.machine.world_size)
    micro_batches, batch = 1, share
    if job.capture == "off":
        micro_batches = math.ceil(share / _EVALUATION_BATCH)
        batch = math.ceil(share / micro_batches)
    work = even_workload(1, batch, _MEAN_TOKENS, _MEAN_MASKED)
    timing = simulate_step(job, work, np.ones(1))
    last = next(i for i, phase in enumerate(timing.phases) if phase.direction == "backward")
    sums_ms = _EVALUATION_COLLECTIVES * job.network.all_reduce_ms(4)
    reads_ms = _HOST_READS * job.constants.sync_us / 1e3
    return micro_batches * float(timing.ends[last - 1, 0]) + sums_ms + reads_ms


def _published(found: Simulated) -> dict[str, float] | None:
    """Return the lowest, median and highest published minutes, and the number of entries.

    The entries ran on as many accelerators as the simulated run. Returns None if there is no entry,
    or if the run does not train to the target of the entries.
    """
    machine = found.job.machine
    minutes = published_minutes(machine.accelerator.published_as, machine.world_size)
    if not minutes or found.estimate.basis == "all steps":
        return None
    median = float(np.median(minutes))
    return {"low": minutes[0], "median": median, "high": minutes[-1], "entries": len(minutes)}


def _in_words(config: RunConfig, found: Simulated) -> Iterator[str]:
    """Yield the lines for the terminal, which describe the machine, the step and the forecast."""
    parallel, run, estimate = config.parallel, found.run, found.estimate
    accumulated = parallel.grad_accum_steps
    micro_batches = f" x {accumulated} micro-batches" if accumulated > 1 else ""
    yield (
        f"{parallel.nodes:,} nodes of {parallel.ranks_per_node} "
        f"{found.job.machine.accelerator.name}, {parallel.local_batch_size} sequences per rank"
        f"{micro_batches}, global batch {parallel.global_batch_size:,}, {config.model.precision}, "
        f"{config.data.sampler}, {config.data.balance}, {config.clip.policy}"
    )
    yield (
        f"{len(found.timings)} drawn steps: imbalance {found.imbalance_tokens:.4f} (tokens of the "
        "rank with the most, divided by the mean)"
    )
    parts = [
        (name, f"{value:.1f} ms", f"{value / run.step_ms:.1%}")
        for name, value in found.parts_ms.items()
    ]
    rows = [*parts, ("", f"{run.step_ms:.1f} ms", "")]
    yield from ("", *aligned(_STEP_NAMES, rows, left=_STEP_NAMES[0]), "")
    communication, exposed = found.mean_ms("communication_ms"), found.mean_ms("exposed_ms")
    yield (
        f"communication {communication:.1f} ms, of which {communication - exposed:.1f} ms overlap "
        f"with computation and {exposed:.1f} ms are exposed"
    )
    rate = 1e3 * parallel.global_batch_size / run.step_ms
    yield (
        f"{rate:,.0f} sequences/s while training, {rate / parallel.world_size:.1f} per accelerator"
    )
    spread = (
        f"{estimate.low:,.0f} to {estimate.high:,.0f}, " if estimate.low < estimate.high else ""
    )
    to_target = estimate.basis != "all steps"
    what = "samples to target" if to_target else "samples"
    yield f"{what}: {estimate.samples:,.0f} ({spread}{estimate.in_words})"
    yield (
        f"time to train: {run.seconds:,.1f} s = {run.steps:,} steps of {run.step_ms:.1f} ms, "
        f"{run.evaluations} evaluations of {run.evaluation_ms:.1f} ms, without start-up"
    )
    yield f"range: {found.low:,.1f} to {found.high:,.1f} s"
    if published := _published(found):
        low, high, entries = published["low"], published["high"], published["entries"]
        times = f"{low:.2f} min" if low == high else f"{low:.2f} to {high:.2f} min"
        yield (
            f"published: {times} on as many of these accelerators ({entries} closed MLPerf "
            f"{'entry' if entries == 1 else 'entries'}); the median is "
            f"{60 * published['median'] / run.seconds:.2f} times this forecast"
        )
    samples = "published samples" if to_target else "samples of all steps"
    yield f"model: simulated step (docs/concepts/cluster_model.md) x {samples}"
    yield f"error: {HELD_OUT}"
    yield _NOT_MODELLED
    yield _NOTE
