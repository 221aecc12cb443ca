"""Which global batch a job of any size takes, and how it is cut into forwards (docs/scaling.md)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, get_args

from bert_tools.plan.recipes import knots
from bert_tools.plan.samples_to_target import Recipe, samples_points
from bert_tools.plan.shipped import geometric, share_between, shipped_rows
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import CLOSED_MOST_BATCH

Accelerator = Literal["a100", "h100", "h200"]
ACCELERATORS: tuple[Accelerator, ...] = get_args(Accelerator)

# Sequences of one forward that somebody has run: NVIDIA 56 without padding on 80 GB, and 48 packs
# of about two; this project 448 on an H200, alone. Of an H200 among others no more than of an H100.
_MOST_SEQUENCES = {"a100": 56, "h100": 96, "h200": 96}
_MOST_ALONE = {"h200": 448}
_NEAR = 1.3  # a batch with a published set is taken where it is so near, by factor
_MOST_SPLIT = 2  # times as many forwards as memory asks for, so that they divide it


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """Sequences of a rank and forward, and forwards of an update."""

    local_batch_size: int
    grad_accum_steps: int


def most_sequences(accelerator: Accelerator, ranks: int) -> int:
    """Sequences of one forward on such an accelerator that somebody has run."""
    most = _MOST_SEQUENCES[accelerator]
    return _MOST_ALONE.get(accelerator, most) if ranks == 1 else most


def choose_batch(ranks: int, recipe: Recipe, accelerator: Accelerator) -> BatchChoice:
    """The batch for so many ranks: near the target one, and a published one where that fits.

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
    """The batch before it is cut: that of `batch_sizes.csv`, or the one of a recipe with one."""
    if recipe in ("open_adam", "open_adamw"):
        return samples_points(recipe)[0].global_batch_size
    sizes = _batch_sizes(accelerator)
    ranks = min(max(ranks, sizes[0].accelerators), sizes[-1].accelerators)
    low, high = next(pair for pair in pairwise(sizes) if ranks <= pair[1].accelerators)
    share = share_between(ranks, low.accelerators, high.accelerators)
    return geometric(low.global_batch_size, high.global_batch_size, share)


def _published_batches(recipe: Recipe) -> list[int]:
    """Those that somebody has published hyper-parameters of, which ours go through."""
    if recipe.startswith("closed"):
        return [each.global_batch_size for each in knots()]
    return [point.global_batch_size for point in samples_points(recipe)]


def _by_nearness(batches: Sequence[int], target: float) -> list[int]:
    near = [each for each in batches if 1 / _NEAR <= each / target <= _NEAR]
    return sorted(near, key=lambda batch: abs(math.log(batch / target)))


def _divided(batch: int, ranks: int, most: int) -> BatchChoice | None:
    """The batch in equal forwards, as few as memory allows; None where that is not even."""
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
    """By accelerators."""
    return shipped_rows("batch_sizes.csv", _BatchSize, accelerator=accelerator)
