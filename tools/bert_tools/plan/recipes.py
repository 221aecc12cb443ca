"""LAMB's hyper-parameters for any global batch, interpolated between published sets.

The sets are those of MLPerf Training BERT, closed division (`published_sets.csv`). How the
interpolation goes, and what of it has been tried: docs/hyperparameters.md. No torch.
"""

import csv
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Literal

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.run_config import CLOSED_MOST_BATCH

_DIGITS = 4  # of an interpolated value: more would claim a precision that nobody measured
_BETA_PLACES = 5  # after the point, as published betas have


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

    @property
    def form(self) -> Literal["continuous", "published"]:
        """Of the schedule: sets with a warm-up were tuned with the published form's jump."""
        return "published" if self.warmup_steps else "continuous"


@dataclass(frozen=True, slots=True)
class PublishedSet:
    """A published set; one of the knots that the interpolation goes through, or only shown."""

    recipe: LambRecipe
    is_knot: bool


@cache
def published_sets() -> tuple[PublishedSet, ...]:
    """All sets of `published_sets.csv`, by batch."""
    with resources.files(__package__).joinpath("published_sets.csv").open(encoding="utf-8") as file:
        return tuple(
            PublishedSet(
                LambRecipe(
                    global_batch_size=int(row["global_batch_size"]),
                    learning_rate=float(row["learning_rate"]),
                    beta_1=float(row["beta_1"]),
                    beta_2=float(row["beta_2"]),
                    weight_decay=float(row["weight_decay"]),
                    warmup_steps=int(row["warmup_steps"]),
                    start_warmup_step=int(row["start_warmup_step"]),
                    decay_steps=int(row["decay_steps"]),
                    source=row["source"],
                ),
                row["role"] == "knot",
            )
            for row in csv.DictReader(file)
        )


def lamb_recipe(global_batch_size: int) -> LambRecipe:
    """The published set of this batch, or one interpolated for it.

    Raises ConfigError for a batch below 1, or above the largest that the closed division has a
    reference convergence point for.
    """
    if not 1 <= global_batch_size <= CLOSED_MOST_BATCH:
        raise ConfigError(
            "global batch",
            f"{global_batch_size:,} lies outside the published sets",
            f"use 1 to {CLOSED_MOST_BATCH:,}",
        )
    knots = [each.recipe for each in published_sets() if each.is_knot]
    if global_batch_size < knots[0].global_batch_size:
        return _below(knots[0], global_batch_size)
    for low, high in pairwise(knots):
        if global_batch_size == low.global_batch_size:
            return low
        if global_batch_size < high.global_batch_size:
            return _between(low, high, global_batch_size)
    return knots[-1]


def _below(smallest: LambRecipe, batch: int) -> LambRecipe:
    """As many samples as the smallest set, at a rate that goes with the batch's square root."""
    ratio = batch / smallest.global_batch_size
    return LambRecipe(
        global_batch_size=batch,
        learning_rate=_rounded(smallest.learning_rate * math.sqrt(ratio)),
        beta_1=smallest.beta_1,
        beta_2=smallest.beta_2,
        weight_decay=smallest.weight_decay,
        warmup_steps=smallest.warmup_steps,
        start_warmup_step=smallest.start_warmup_step,
        decay_steps=round(smallest.decay_steps / ratio),
        source=f"extrapolated from {smallest.global_batch_size:,}",
    )


def _between(low: LambRecipe, high: LambRecipe, batch: int) -> LambRecipe:
    """A straight line over the logarithm of the batch, of logarithms or of shares."""
    width = math.log(high.global_batch_size / low.global_batch_size)
    share = math.log(batch / low.global_batch_size) / width

    def geometric(a: float, b: float) -> float:
        return a * math.exp(share * math.log(b / a))

    def rounded(a: float, b: float) -> float:
        return a if a == b else _rounded(geometric(a, b))

    def of_steps(a: int, b: int) -> int:
        """Steps of the warm-up, whose share of the schedule is what goes in a straight line."""
        at_low, at_high = a / low.decay_steps, b / high.decay_steps
        return round(decay_steps * (at_low + share * (at_high - at_low)))

    decay_steps = round(geometric(low.decay_steps, high.decay_steps))
    return LambRecipe(
        global_batch_size=batch,
        learning_rate=rounded(low.learning_rate, high.learning_rate),
        beta_1=round(1 - geometric(1 - low.beta_1, 1 - high.beta_1), _BETA_PLACES),
        beta_2=round(1 - geometric(1 - low.beta_2, 1 - high.beta_2), _BETA_PLACES),
        weight_decay=rounded(low.weight_decay, high.weight_decay),
        warmup_steps=of_steps(low.warmup_steps, high.warmup_steps),
        start_warmup_step=of_steps(low.start_warmup_step, high.start_warmup_step),
        decay_steps=decay_steps,
        source=f"interpolated, {low.global_batch_size:,} to {high.global_batch_size:,}",
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
