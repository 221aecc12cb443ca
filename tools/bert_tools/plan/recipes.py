"""Hyper-parameters of published recipes for any global batch, and a batch for any job. No torch.

LAMB's sets are those of MLPerf Training BERT, closed division (`published_sets.csv`). The lines
between them, and which of their points were tried: docs/reference/hyperparameters.md. The open
recipes are `open_adam`, Samsung's (MLPerf v2.0), and `open_adamw`, MosaicML's (v2.1), each
published at one batch: below it the schedule keeps its samples and the rate goes with the batch's
square root, above it both stay. `open_hypothesis` lies on straight lines in logarithms through the
two, and takes the values of the nearer one beyond them. `open_muon` has its values as well, but for
the clip limit and fewer steps, as in our study of a small model (logs/2026-11-24-optimizers). How
the batch is chosen and cut into forwards: docs/how/scaling.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args

from bert_tools.plan.samples_to_target import Recipe, samples_points, samples_to_target
from bert_tools.plan.shipped import geometric, rounded, share_between, shipped_rows
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import CLOSED_MOST_BATCH, MOST_OF_UNEQUAL_COUNTS, RunConfig

Sections = dict[str, dict[str, Any]]
UNEQUAL = range(2, MOST_OF_UNEQUAL_COUNTS + 1)  # sequences per forward that uneven counts balance

_DIGITS = 4  # digits of an interpolated value: nobody measured more
_BETA_PLACES = 5  # after the point, as published betas have

_ADAM = {
    "learning_rate": 3.9299421615882676e-4,
    "beta_1": 0.8003575444254268,
    "beta_2": 0.8174653681457493,
    "epsilon": 1e-9,
    "weight_decay": 2.8861703130042965e-3,
}
_ADAM_END_RATE = 4.94549100544884e-5
_ADAM_STEPS, _ADAM_WARM_UP, _ADAM_START, _ADAM_MOST_STEPS = 179, 82, -16, 299
# MosaicML's decay is not times the rate, as ours is: 1e-5 a step at a rate of 1e-4 is 0.1 here.
_ADAMW = {
    "learning_rate": 1e-4,
    "beta_1": 0.9,
    "beta_2": 0.98,
    "epsilon": 1e-6,
    "weight_decay": 0.1,
}
_ADAMW_STEPS, _ADAMW_WARM_UP, _ADAMW_EVALUATION_STEPS = 2800, 80, 55
_HYPOTHESIS_DIGITS = 2  # its lines are no more precise than that


@dataclass(frozen=True, kw_only=True, slots=True)
class LambRecipe:
    """One set of hyper-parameters: LAMB with epsilon 1e-6, linear decay to 0, norm limit 1.

    The fields are those of the config's sections `optim` and `schedule`.
    """

    global_batch_size: int
    learning_rate: float
    beta_1: float
    beta_2: float
    weight_decay: float
    warmup_steps: int
    start_warmup_step: int
    decay_steps: int
    source: str
    role: str = "line"  # of a published set "knot" or "shown"

    @property
    def form(self) -> Literal["continuous", "published"]:
        """Form of the schedule: sets with a warm-up were tuned with the published form's jump."""
        return "published" if self.warmup_steps else "continuous"


@cache
def published_sets() -> tuple[LambRecipe, ...]:
    """All sets of `published_sets.csv`, by batch; lines go through the knots."""
    return shipped_rows("published_sets.csv", LambRecipe)


@cache
def knots() -> tuple[LambRecipe, ...]:
    """The published sets between which values are interpolated."""
    return tuple(each for each in published_sets() if each.role == "knot")


def lamb_recipe(global_batch_size: int) -> LambRecipe:
    """The published set of this batch, or one interpolated for it.

    Raises ConfigError for a batch below 1, or above the largest reference convergence point of the
    closed division.
    """
    if not 1 <= global_batch_size <= CLOSED_MOST_BATCH:
        raise ConfigError(
            "global batch",
            f"{global_batch_size:,} lies outside the published sets",
            f"use 1 to {CLOSED_MOST_BATCH:,}",
        )
    if global_batch_size < knots()[0].global_batch_size:
        return _below(knots()[0], global_batch_size)
    for low, high in pairwise(knots()):
        if global_batch_size == low.global_batch_size:
            return low
        if global_batch_size < high.global_batch_size:
            return _between(low, high, global_batch_size)
    return knots()[-1]


def _below(smallest: LambRecipe, batch: int) -> LambRecipe:
    """The samples of the smallest set, at a rate that goes with the batch's square root."""
    ratio = batch / smallest.global_batch_size
    return replace(
        smallest,
        global_batch_size=batch,
        learning_rate=rounded(smallest.learning_rate * math.sqrt(ratio), _DIGITS),
        decay_steps=round(smallest.decay_steps / ratio),
        role="line",
        source=f"extrapolated from {smallest.global_batch_size:,}",
    )


def _between(low: LambRecipe, high: LambRecipe, batch: int) -> LambRecipe:
    """Interpolate logarithms, or shares, linearly over the logarithm of the batch."""
    share = share_between(batch, low.global_batch_size, high.global_batch_size)

    def between(a: float, b: float) -> float:
        return a if a == b else rounded(geometric(a, b, share), _DIGITS)

    def below_one(a: float, b: float) -> float:
        return round(1 - geometric(1 - a, 1 - b, share), _BETA_PLACES)

    def of_steps(a: int, b: int) -> int:
        """Steps of the warm-up, whose share of the schedule is interpolated linearly."""
        at_low, at_high = a / low.decay_steps, b / high.decay_steps
        return round(decay_steps * (at_low + share * (at_high - at_low)))

    decay_steps = round(geometric(low.decay_steps, high.decay_steps, share))
    return LambRecipe(
        global_batch_size=batch,
        learning_rate=between(low.learning_rate, high.learning_rate),
        beta_1=below_one(low.beta_1, high.beta_1),
        beta_2=below_one(low.beta_2, high.beta_2),
        weight_decay=between(low.weight_decay, high.weight_decay),
        warmup_steps=of_steps(low.warmup_steps, high.warmup_steps),
        start_warmup_step=of_steps(low.start_warmup_step, high.start_warmup_step),
        decay_steps=decay_steps,
        source=f"interpolated, {low.global_batch_size:,} to {high.global_batch_size:,}",
    )


def recipe_of(config: RunConfig) -> Recipe:
    """The recipe whose samples a config's run is expected to need, by its optimizer."""
    if config.mlperf.division == "closed" or config.optim.name == "lamb":
        return "closed_lamb"
    if config.optim.name == "muon":
        return "open_muon"
    if config.schedule.end_learning_rate > 0 and config.optim.epsilon != _ADAM["epsilon"]:
        return "open_hypothesis"  # its betas may be those of a point
    betas = config.optim.beta_1, config.optim.beta_2
    named: tuple[tuple[Recipe, dict[str, float]], ...] = (
        ("open_adam", _ADAM),
        ("open_adamw", _ADAMW),
    )
    found = (name for name, values in named if betas == (values["beta_1"], values["beta_2"]))
    return next(found, "open_hypothesis")


def open_sections(recipe: Recipe, global_batch_size: int, local_batch_size: int) -> Sections:
    """Sections optim, schedule, clip, data and the other settings that the recipe decides."""
    if recipe == "open_adam":
        return _adam(global_batch_size, local_batch_size)
    if recipe == "open_adamw":
        return _adamw(global_batch_size)
    if recipe == "open_muon":
        return _muon(global_batch_size)
    return _hypothesis(global_batch_size)


def _adam(batch: int, local_batch: int) -> Sections:
    ratio = min(1.0, batch / samples_points("open_adam")[0].global_batch_size)
    root = math.sqrt(ratio)
    return {
        "run": {"max_steps": round(_ADAM_MOST_STEPS / ratio)},
        "data": {"sampler": _strata(batch, local_batch), "balance": "presort_local"},
        "optim": {
            "name": "adamw",
            **_ADAM,
            "learning_rate": _ADAM["learning_rate"] * root,
            "loss_normalization": "per_rank",
        },
        "schedule": {
            "form": "published",
            "warmup_steps": round(_ADAM_WARM_UP / ratio),
            "start_warmup_step": round(_ADAM_START / ratio),
            "decay_steps": round(_ADAM_STEPS / ratio),
            "end_learning_rate": _ADAM_END_RATE * root,
        },
        "clip": {
            "policy": "bucket_before_allreduce",
            "max_norm": 1.0,
            "bucket_limit": "equal_share",
            "bucket_count": 22,
        },
    }


def _strata(batch: int, local_batch: int) -> str:
    """The published draw if it divides a rank's batch evenly; else quantiles, unbiased."""
    for group, name in ((16, "strata_6_3_2_5"), (12, "strata_4_2_2_4")):
        if local_batch % group == 0:
            return name
    return "strata_6_3_2_5" if batch % 16 == 0 else "quantile"


def _adamw(batch: int) -> Sections:
    ratio = min(1.0, batch / samples_points("open_adamw")[0].global_batch_size)
    return {
        "model": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        "optim": {
            "name": "adamw",
            **_ADAMW,
            "learning_rate": _ADAMW["learning_rate"] * math.sqrt(ratio),
        },
        "schedule": {
            "warmup_steps": round(_ADAMW_WARM_UP / ratio),
            "decay_steps": round(_ADAMW_STEPS / ratio),
        },
        "clip": {"policy": "none"},
        "eval": {"interval_samples": round(_ADAMW_EVALUATION_STEPS / ratio) * batch},
    }


def _hypothesis(batch: int) -> Sections:
    small, large = samples_points("open_hypothesis")
    share = share_between(batch, small.global_batch_size, large.global_batch_size)
    share = min(1.0, max(0.0, share))

    def between(a: float, b: float) -> float:
        return rounded(geometric(a, b, share), _HYPOTHESIS_DIGITS)

    steps = max(2, round(samples_to_target(batch, "open_hypothesis").samples / batch))
    rate = between(_ADAMW["learning_rate"], _ADAM["learning_rate"])
    return {
        "run": {"max_steps": math.ceil(steps * _ADAM_MOST_STEPS / _ADAM_STEPS)},
        "model": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        "data": {"sampler": "quantile"},
        "optim": {
            "name": "adamw",
            "learning_rate": rate,
            "beta_1": round(1 - between(1 - _ADAMW["beta_1"], 1 - _ADAM["beta_1"]), 4),
            "beta_2": round(1 - between(1 - _ADAMW["beta_2"], 1 - _ADAM["beta_2"]), 4),
            "epsilon": 1e-6,
            "weight_decay": between(_ADAMW["weight_decay"], _ADAM["weight_decay"]),
        },
        "schedule": {
            "warmup_steps": min(_ADAMW_WARM_UP, steps // 2),
            "decay_steps": steps,
            "end_learning_rate": rounded(
                rate * _ADAM_END_RATE / _ADAM["learning_rate"], _HYPOTHESIS_DIGITS
            ),
        },
        "clip": {"policy": "none"},
    }


def _muon(batch: int) -> Sections:
    """AdamW's rate and decay, which Muon's update is scaled for, over as many steps as it needs."""
    sections = _hypothesis(batch)
    steps = max(2, round(samples_to_target(batch, "open_muon").samples / batch))
    warm_up = min(sections["schedule"]["warmup_steps"], steps // 2)
    return sections | {
        "optim": sections["optim"] | {"name": "muon", "momentum": 0.95},
        "schedule": sections["schedule"] | {"warmup_steps": warm_up, "decay_steps": steps},
        "clip": {"policy": "after_allreduce", "max_norm": 1.0},
    }


Accelerator = Literal["a100", "h100", "h200"]
ACCELERATORS: tuple[Accelerator, ...] = get_args(Accelerator)

# Sequences of one forward that somebody has run: NVIDIA 56 without padding on 80 GB, and 48 packs
# of about two; this project 448 on an H200, alone. Of an H200 among others no more than of an H100.
_MOST_SEQUENCES = {"a100": 56, "h100": 96, "h200": 96}
_MOST_ALONE = {"h200": 448}
_NEAR = 1.3  # a batch with a published set is taken if it lies within this factor
_MOST_SPLIT = 2  # forwards over those memory asks for, so that they divide the batch


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """Sequences per rank and forward, and forwards per update."""

    local_batch_size: int
    grad_accum_steps: int


def most_sequences(accelerator: Accelerator, ranks: int) -> int:
    """Most sequences in one forward that somebody has run on such an accelerator."""
    most = _MOST_SEQUENCES[accelerator]
    return _MOST_ALONE.get(accelerator, most) if ranks == 1 else most


def choose_batch(ranks: int, recipe: Recipe, accelerator: Accelerator) -> BatchChoice:
    """A batch for `ranks` near the target one; a published one if that fits.

    Raises ConfigError for more ranks than the largest batch of the closed division has sequences.
    """
    target, most = target_batch(ranks, recipe, accelerator), most_sequences(accelerator, ranks)
    for batch in _by_nearness(_published_batches(recipe), target):
        exact = _divided(batch, ranks, most)
        if exact is not None:
            return exact
    each = max(1, round(target / ranks))
    if recipe.startswith("closed"):
        if ranks > CLOSED_MOST_BATCH:
            problem = f"are {ranks:,} ranks, more than sequences of the largest batch"
            raise ConfigError("--nodes", problem, f"use {CLOSED_MOST_BATCH:,} at most, or go open")
        each = min(each, CLOSED_MOST_BATCH // ranks)
    forwards = math.ceil(each / most)
    return BatchChoice(max(1, round(each / forwards)), forwards)


def target_batch(ranks: int, recipe: Recipe, accelerator: Accelerator) -> float:
    """The batch before it is cut: from `batch_sizes.csv`, or the recipe's only one."""
    if recipe in ("open_adam", "open_adamw"):
        return samples_points(recipe)[0].global_batch_size
    sizes = _batch_sizes(accelerator)
    ranks = min(max(ranks, sizes[0].accelerators), sizes[-1].accelerators)
    low, high = next(pair for pair in pairwise(sizes) if ranks <= pair[1].accelerators)
    share = share_between(ranks, low.accelerators, high.accelerators)
    return geometric(low.global_batch_size, high.global_batch_size, share)


def _published_batches(recipe: Recipe) -> list[int]:
    """Batches with published hyper-parameters, which ours go through."""
    if recipe.startswith("closed"):
        return [each.global_batch_size for each in knots()]
    return [point.global_batch_size for point in samples_points(recipe)]


def _by_nearness(batches: Sequence[int], target: float) -> list[int]:
    near = [each for each in batches if 1 / _NEAR <= each / target <= _NEAR]
    return sorted(near, key=lambda batch: abs(math.log(batch / target)))


def _divided(batch: int, ranks: int, most: int) -> BatchChoice | None:
    """The batch cut into as few equal forwards as memory allows; None if it does not divide."""
    each, rest = divmod(batch, ranks)
    if rest:
        return None
    least = math.ceil(each / most)
    for forwards in range(least, _MOST_SPLIT * least + 1):
        if each % forwards == 0:
            return BatchChoice(each // forwards, forwards)
    return None


@dataclass(frozen=True, slots=True)
class _BatchSize:
    accelerators: int
    global_batch_size: int


@cache
def _batch_sizes(accelerator: Accelerator) -> tuple[_BatchSize, ...]:
    """Batch sizes by number of accelerators."""
    return shipped_rows("batch_sizes.csv", _BatchSize, accelerator=accelerator)
