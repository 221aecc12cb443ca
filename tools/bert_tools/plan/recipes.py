"""Hyper-parameters of published sets for any global batch, and a batch for any job. No torch.

The sets are those of MLPerf Training BERT, closed division (`published_sets.csv`). The lines
between them, and which of their points were tried: docs/reference/hyperparameters.md. How the
batch is chosen and cut into forwards: docs/how/scaling.md.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal, get_args

from bert_tools.plan.samples_to_target import Recipe
from bert_tools.plan.shipped import geometric, rounded, share_between, shipped_rows
from mlperf_bert.config.run_config import CLOSED_MOST_BATCH, RunConfig
from mlperf_bert.errors import ConfigError

_DIGITS = 4  # digits of an interpolated value: nobody measured more
_BETA_PLACES = 5  # after the point, as published betas have

_ADAM_BETAS, _ADAM_EPSILON = (0.8003575444254268, 0.8174653681457493), 1e-9
_ADAMW_BETAS = (0.9, 0.98)


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
        """Form of the schedule: sets with a warm-up were tuned with the published form's jump."""
        return "published" if self.warmup_steps else "continuous"


@cache
def knots() -> tuple[LambRecipe, ...]:
    """The published sets between which values are interpolated, by batch."""
    return shipped_rows("published_sets.csv", LambRecipe)


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
    if config.schedule.end_learning_rate > 0 and config.optim.epsilon != _ADAM_EPSILON:
        return "open_hypothesis"  # its betas may be those of a point
    betas = config.optim.beta_1, config.optim.beta_2
    named: dict[tuple[float, float], Recipe] = {
        _ADAM_BETAS: "open_adam",
        _ADAMW_BETAS: "open_adamw",
    }
    return named.get(betas, "open_hypothesis")


Accelerator = Literal["a100", "h100", "h200"]
ACCELERATORS: tuple[Accelerator, ...] = get_args(Accelerator)

# Sequences of one forward that somebody has run: NVIDIA 56 without padding on 80 GB, and 48 packs
# of about two; this project 448 on an H200, alone. Of an H200 among others no more than of an H100.
_MOST_SEQUENCES = {"a100": 56, "h100": 96, "h200": 96}
_MOST_ALONE = {"h200": 448}


@dataclass(frozen=True, slots=True)
class _BatchSize:
    accelerators: int
    global_batch_size: int


def choose_batch(ranks: int, accelerator: Accelerator) -> tuple[int, int]:
    """Sequences per rank and forward, and forwards per update, for so many ranks.

    The global batch lies on straight lines of logarithms between those of `batch_sizes.csv`; each
    rank takes the nearest whole number of sequences, in forwards that memory is known to hold.
    Raises ConfigError for more ranks than the largest batch of the closed division has sequences.
    """
    if ranks > CLOSED_MOST_BATCH:
        problem = f"makes {ranks:,} ranks, more than sequences of the largest batch"
        raise ConfigError("--nodes", problem, f"use {CLOSED_MOST_BATCH:,} at most")
    sizes = shipped_rows("batch_sizes.csv", _BatchSize, accelerator=accelerator)
    known = min(max(ranks, sizes[0].accelerators), sizes[-1].accelerators)
    low, high = next(pair for pair in pairwise(sizes) if known <= pair[1].accelerators)
    share = share_between(known, low.accelerators, high.accelerators)
    batch = geometric(low.global_batch_size, high.global_batch_size, share)
    each = min(max(1, round(batch / ranks)), CLOSED_MOST_BATCH // ranks)
    most = _MOST_SEQUENCES[accelerator]
    if ranks == 1:
        most = _MOST_ALONE.get(accelerator, most)
    forwards = math.ceil(each / most)
    return max(1, round(each / forwards)), forwards
