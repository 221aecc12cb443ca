"""The one forecast of a time to train: a simulated step times the samples that a recipe needs.

Every command and table that gives a time to train takes it from here. Its range has two parts:
the bounds of the simulator's assumed constants, and the spread of the published samples. The law
of published entries, time = a * p^b, stands beside it as a cross-check.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from bert_tools.plan.cluster.machine import (
    AcceleratorName,
    Constants,
    constant_rows,
    default_constants,
)
from bert_tools.plan.cluster.simulation import Question, Simulated, simulate, timed
from bert_tools.plan.entries import Entry, chosen, published_entries
from bert_tools.plan.recipes import recipe_of
from bert_tools.plan.sample_index import SampleIndex
from bert_tools.plan.scaling_law import ScalingLaw, fit_law
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ModelSection

# From logs/2026-11-22-cluster-model/tables.json; a test compares.
HELD_OUT = (
    "on held-out A100 runs the time to train (step x samples) is within 15 % in 10 of 16 classes, "
    "mean error 12.0 %, and the step in 17 of 19, mean error 7.7 %"
)
NOT_MODELLED = (
    "not modelled: faults, restarts, a shared or thinner network, reading of data, clocks that "
    "fall with heat; our program has not run on a GPU"
)
# The law beside the forecast is fitted to the entries of these rounds.
LAW_FILTERS: dict[str, tuple[str, ...]] = {
    "a100": ("round=2.1", "submitter=NVIDIA", "division=closed", "accelerator~A100"),
    "h100": ("round>=3.0", "round<=3.1", "submitter~NVIDIA", "accelerator~H100"),
    "h200": ("round>=4.0", "division=closed", "accelerator~H200"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Time to train with one constant at its lower and its upper bound, over the forecast's time.

    The bounds of an `assumed` constant count in the range. Bounds of a fitted constant are those of
    the search; at them the simulator would miss every run it was fitted to.
    """

    name: str
    assumed: bool
    at_low: float
    at_high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Seconds to the target and their range; `best` and `worst` move all constants at once.

    `step_low` and `step_high` take assumed constants as independent: root of the sum of squares.
    """

    simulated: Simulated
    bounds: tuple[Bound, ...]
    best: float
    worst: float
    law: ScalingLaw

    @property
    def seconds(self) -> float:
        """Expected seconds to the target."""
        return self.simulated.run.seconds

    @property
    def step_low(self) -> float:
        """Fewest seconds within the constants' bounds, at the expected samples."""
        return self.seconds * (1 - self._together(min))

    @property
    def step_high(self) -> float:
        """Most seconds within the constants' bounds, at the expected samples."""
        return self.seconds * (1 + self._together(max))

    def _together(self, end: Any) -> float:
        shares = [end(each.at_low, each.at_high, 1.0) - 1 for each in self.bounds if each.assumed]
        return math.hypot(*shares)

    @property
    def low(self) -> float:
        """Seconds with both the constants' lower bounds and the fewest samples."""
        return self._with_samples(self.step_low, self.simulated.estimate.low)

    @property
    def high(self) -> float:
        """Seconds with both the constants' upper bounds and the most samples."""
        return self._with_samples(self.step_high, self.simulated.estimate.high)

    def _with_samples(self, seconds: float, samples: float) -> float:
        start = self.simulated.run.start_up_s
        return start + (seconds - start) * samples / self.simulated.estimate.samples

    @property
    def law_seconds(self) -> float:
        """Seconds by the law of published entries for as many accelerators."""
        return 60 * self.law.time.at(self.simulated.question.world_size)

    @property
    def published(self) -> tuple[Entry, ...]:
        """Published entries of the law on as many accelerators."""
        ranks = self.simulated.question.world_size
        return tuple(each for each in self.law.entries if each.accelerators == ranks)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for --json; times in seconds."""
        names = ("seconds", "low", "high", "step_low", "step_high", "best", "worst", "law_seconds")
        facts = {name: getattr(self, name) for name in names}
        return facts | {"bounds": [asdict(each) for each in self.bounds], "held_out": HELD_OUT}


def forecast(question: Question, index: SampleIndex) -> Forecast:
    """The forecast of a question. Raises ConfigError if its batch cannot be drawn or held."""
    found = simulate(question, index)
    shipped = default_constants()

    def seconds(constants: Constants) -> float:
        return timed(question, found.works[:1], constants).run.seconds

    expected = seconds(shipped)
    bounds, best, worst = [], shipped, shipped
    for row in constant_rows():
        low, high = (
            seconds(replace(shipped, **{row.name: end})) / expected for end in (row.low, row.high)
        )
        assumed = row.kind == "assumed"
        bounds.append(Bound(name=row.name, assumed=assumed, at_low=low, at_high=high))
        ends = (row.low, row.high) if low < high else (row.high, row.low)
        best, worst = (
            replace(constants, **{row.name: end})
            for constants, end in zip((best, worst), ends, strict=True)
        )
    return Forecast(
        simulated=found,
        bounds=tuple(bounds),
        best=found.run.seconds * seconds(best) / expected,
        worst=found.run.seconds * seconds(worst) / expected,
        law=law_of(question.accelerator.removesuffix("_40gb")),
    )


@cache
def law_of(accelerator: str) -> ScalingLaw:
    """The law of the published entries on that accelerator."""
    entries = chosen(published_entries(), LAW_FILTERS[accelerator])
    return fit_law([each for each in entries if each.time_min and each.accelerators])


def question_of(
    config: RunConfig, origin: str, accelerator: AcceleratorName | None = None
) -> dict[str, Any]:
    """The `Question` that a config asks; `origin` is its name, which may tell the accelerator.

    Raises ConfigError for a run on a CPU, and for a model other than BERT-large, lengths or kernels
    that the simulator does not have.
    """
    model, parallel, usual = config.model, config.parallel, ModelSection()
    shape = ("architecture", "num_layers", "hidden_size", "intermediate_size", "num_heads")
    if config.run.device == "cpu" or any(getattr(model, n) != getattr(usual, n) for n in shape):
        problem = "is not BERT-large on GPUs, the only simulated case"
        raise ConfigError(origin, problem, "give another config, such as dgxa100_8x8x48x1")
    if config.data.max_seq_length != 512 or model.kernels == "reference":
        problem = "has lengths other than 512 or the reference kernels, which are not simulated"
        raise ConfigError(origin, problem, "leave data.max_seq_length and model.kernels alone")
    told = next((each for each in ("h100", "h200") if each in origin), "a100")
    precision = "bf16" if model.precision == "bf16_autocast" else model.precision
    shards = {"shard_node": "node", "shard_world": "world"}
    return {
        "accelerator": accelerator or told,
        "nodes": parallel.nodes,
        "gpus_per_node": parallel.ranks_per_node,
        "local_batch_size": parallel.local_batch_size,
        "grad_accum_steps": parallel.grad_accum_steps,
        "capture": "on" if config.run.step_mode == "captured" else "off",
        "sharding": shards.get(parallel.data_parallel, "none"),
        "precision": precision,
        "sampler": config.data.sampler,
        "balance": config.data.balance,
        "counts": config.data.counts_per_rank,
        "clip": config.clip.policy,
        "bucket_cap_mb": parallel.bucket_cap_mb,
        "recipe": recipe_of(config),
        "evaluation_interval": config.eval_interval_samples,
    }


def too_few_steps(config: RunConfig, steps: int) -> str | None:
    """A warning if the run stops before it is expected to reach the target."""
    if steps <= config.max_steps:
        return None
    return (
        f"the run stops after {config.max_steps:,} steps, {steps:,} are expected: "
        "raise run.max_steps"
    )


def in_words(found: Forecast) -> Iterator[str]:
    """Lines on samples, time with its range, the model with its errors, and the law beside it."""
    run, estimate = found.simulated.run, found.simulated.estimate
    spread = (
        f"{estimate.low:,.0f} to {estimate.high:,.0f}; " if estimate.low < estimate.high else ""
    )
    yield f"samples to the target: {estimate.samples:,.0f} ({spread}{estimate.in_words})"
    yield (
        f"time to train: {run.seconds:,.1f} s = {run.steps:,} + {run.skipped_steps} skipped steps "
        f"of {run.step_ms:.1f} ms, {run.evaluations} evaluations of {run.evaluation_ms:.1f} ms, "
        + (f"start-up {run.start_up_s:g} s" if run.start_up_s else "start-up not counted")
    )
    yield (
        f"range: {found.low:,.1f} to {found.high:,.1f} s; by the assumed constants' bounds alone "
        f"{found.step_low:,.1f} to {found.step_high:,.1f} s (every constant at its worse bound at "
        f"once, fitted ones too: {found.best:,.1f} to {found.worst:,.1f} s)"
    )
    yield f"model: the simulated step (docs/how/cluster_model.md) x published samples; {HELD_OUT}"
    yield from _law_in_words(found)
    yield NOT_MODELLED


def _law_in_words(found: Forecast) -> Iterator[str]:
    """The cross-check: the law's time over the forecast's, split into samples and step."""
    law, question = found.law, found.simulated.question
    assert law.samples is not None, "the shipped entries have their samples"
    ratio = found.law_seconds / found.seconds
    samples = law.samples.at(question.world_size) / found.simulated.estimate.samples
    sizes = [each.accelerators or 0 for each in law.entries]
    misses = [law.residual(each) - 1 for each in law.entries]
    yield (
        f"cross-check: {law.time.coefficient:.1f} minutes * p^{law.time.exponent:.3f} (plan law) "
        f"says {found.law_seconds:,.1f} s, {ratio:.2f} times that: {samples:.2f} by samples and "
        f"{ratio / samples:.2f} by the step, as it is a straight line through {len(sizes)} entries "
        f"on {min(sizes):,} to {max(sizes):,}, each with its own program and batch, and misses "
        f"these by {min(misses):+.0%} to {max(misses):+.0%}"
    )
    for entry in found.published:
        yield (
            f"published: {entry.name} took {60 * (entry.time_min or math.nan):,.1f} s on as many, "
            f"{entry.samples or 0:,.0f} samples, global batch {entry.global_batch_size or 0:,}"
        )
