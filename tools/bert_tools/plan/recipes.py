"""Chooses a global batch and hyper-parameters, and estimates the number of samples to target.

The sets of hyper-parameters are those of MLPerf Training BERT, closed division
(`published_sets.csv`). docs/reference/hyperparameters.md explains how values between the sets are
interpolated, and which interpolated sets were tried. docs/concepts/scaling.md explains how the
batch is chosen and split into micro-batches.

`samples_points.csv` lists the published numbers of samples to a masked-LM accuracy of 0.720.
Between two points of a recipe, the logarithm of the samples is interpolated linearly over the
logarithm of the batch. Outside this range nothing is published. A smaller batch is assumed to need
as many samples as the smallest published batch, and a larger batch as many steps as the largest.
Both assumptions give upper bounds if a larger batch never needs fewer samples or more steps. This
module needs no torch.
"""

import csv
import math
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Literal, TypeVar, get_args, get_type_hints

from mlperf_bert.config.run_config import CLOSED_MOST_BATCH, RunConfig
from mlperf_bert.errors import ConfigError

Row = TypeVar("Row")

_DIGITS = 4  # significant digits of an interpolated value, which is not more precise
_BETA_DECIMALS = 5  # decimals of an interpolated beta, as many as published betas have

_ADAM_BETAS, _ADAM_EPSILON = (0.8003575444254268, 0.8174653681457493), 1e-9
_ADAMW_BETAS = (0.9, 0.98)

# The recipes are LAMB with the closed division's published sets (`published_sets.csv`), Samsung's
# Adam, MosaicML's AdamW without dropout, and a curve through the points of the last two. This curve
# is a hypothesis, because no third point was published that could confirm it.
Recipe = Literal["closed_lamb", "open_adam", "open_adamw", "open_hypothesis"]

# The curve steps = _MIN_STEPS * (1 + _SATURATION / batch) goes through MosaicML's point and
# Samsung's.
_MIN_STEPS, _SATURATION = 145, 3_900

# The basis of a number of samples. A value between two published points counts as published. If
# nothing is known about the samples to target, a run is assumed to need all steps of its config.
Basis = Literal["published", "extrapolated", "all steps"]


def shipped_rows(file: str, kind: type[Row], **chosen: str) -> tuple[Row, ...]:
    """Read the rows of a CSV file in this package as instances of the dataclass `kind`.

    The fields of `kind` are the column names. Their types are int, float or str. If `chosen` maps a
    column to a value, only rows with this value are returned.
    """
    text = resources.files("bert_tools.plan").joinpath(file).read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    types = {
        key: each if each in (int, float) else str for key, each in get_type_hints(kind).items()
    }
    return tuple(
        kind(**{key: of(row[key]) for key, of in types.items()})
        for row in csv.DictReader(lines)
        if all(row[column] == value for column, value in chosen.items())
    )


def share_between(value: float, low: float, high: float) -> float:
    """Return the position of a value between `low` (0) and `high` (1) on a logarithmic scale."""
    return math.log(value / low) / math.log(high / low)


def geometric(low: float, high: float, share: float) -> float:
    """Return the value at a position between `low` (0) and `high` (1) on a logarithmic scale."""
    return low * math.exp(share * math.log(high / low))


def rounded(value: float, digits: int) -> float:
    """Round a value to a number of significant digits."""
    return float(f"{value:.{digits}g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LambRecipe:
    """Hyper-parameters for LAMB with epsilon 1e-6, linear decay to 0 and clipping to norm 1.

    The fields have the names of settings in the config's sections `optim` and `schedule`.
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
        """Return the setting `schedule.form`, which describes the learning-rate schedule.

        Sets with a warm-up were tuned with the form `published`, in which the rate jumps.
        """
        return "published" if self.warmup_steps else "continuous"


@cache
def knots() -> tuple[LambRecipe, ...]:
    """Return the published sets of hyper-parameters that are interpolated, sorted by batch."""
    return shipped_rows("published_sets.csv", LambRecipe)


def lamb_recipe(global_batch_size: int) -> LambRecipe:
    """Return the published hyper-parameters for a batch, or interpolated ones.

    Raises ConfigError for a batch below 1, or above the largest reference convergence point of the
    closed division.
    """
    if not 1 <= global_batch_size <= CLOSED_MOST_BATCH:
        raise ConfigError(
            "global batch",
            f"{global_batch_size:,} is outside the range of published hyper-parameters",
            f"use a batch of 1 to {CLOSED_MOST_BATCH:,} sequences",
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
    """Extrapolate the hyper-parameters of the smallest batch to an even smaller batch.

    The number of samples stays the same, and the learning rate is proportional to sqrt(batch).
    """
    ratio = batch / smallest.global_batch_size
    return replace(
        smallest,
        global_batch_size=batch,
        learning_rate=rounded(smallest.learning_rate * math.sqrt(ratio), _DIGITS),
        decay_steps=round(smallest.decay_steps / ratio),
        source=f"extrapolated from {smallest.global_batch_size:,}",
    )


def _between(low: LambRecipe, high: LambRecipe, batch: int) -> LambRecipe:
    """Interpolate between two sets of hyper-parameters, linearly in the logarithm of the batch.

    The interpolated quantities are the logarithms of rates and steps, the logarithm of 1 - beta,
    and the warm-up's share of the schedule's steps.
    """
    share = share_between(batch, low.global_batch_size, high.global_batch_size)

    def between(a: float, b: float) -> float:
        return a if a == b else rounded(geometric(a, b, share), _DIGITS)

    def below_one(a: float, b: float) -> float:
        """Interpolate between two values, linearly in the logarithm of 1 - value."""
        return round(1 - geometric(1 - a, 1 - b, share), _BETA_DECIMALS)

    def of_steps(a: int, b: int) -> int:
        """Interpolate a number of steps linearly, as a share of the schedule's steps."""
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


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimate of the samples (sequences) to target.

    `samples` is a mean of ten runs. `low` and `high` are the 5% and 95% quantiles of such means.
    For points with few entries, `low` and `high` differ from `samples` by one standard deviation of
    a single run. For recipes of the open division, they are the range of the published means.
    `source` describes where the estimate comes from.
    """

    samples: float
    low: float
    high: float
    source: str
    basis: Basis = "published"

    @property
    def in_words(self) -> str:
        """Return the basis and the source of the estimate as one text."""
        return f"{self.basis}: {self.source}"


@dataclass(frozen=True, slots=True)
class SamplesPoint:
    """The samples to target of a recipe with one global batch, from published MLPerf entries.

    `entries` is the number of these entries.
    """

    global_batch_size: int
    samples: float
    low: float
    high: float
    entries: int
    source: str


@cache
def samples_points(recipe: Recipe) -> tuple[SamplesPoint, ...]:
    """Return a recipe's published numbers of samples to target, sorted by batch."""
    if recipe == "open_hypothesis":
        return samples_points("open_adamw") + samples_points("open_adam")[:1]
    return shipped_rows("samples_points.csv", SamplesPoint, recipe=recipe)


def samples_to_target(global_batch_size: int, recipe: Recipe) -> Estimate:
    """Estimate how many sequences a recipe needs to reach the target with this global batch."""
    batch = global_batch_size
    points = samples_points(recipe)
    small, large = points[0], points[-1]
    # A smaller batch needs at most the samples of the smallest point, and at least its steps.
    if batch < small.global_batch_size:
        return Estimate(
            samples=small.samples,
            low=small.low * batch / small.global_batch_size,
            high=small.high,
            source=f"the samples at {small.global_batch_size:,} ({small.source})",
            basis="extrapolated",
        )
    # A larger batch needs at most the steps of the largest point, and at least its samples.
    if batch > large.global_batch_size:
        ratio = batch / large.global_batch_size
        return Estimate(
            samples=large.samples * ratio,
            low=large.low,
            high=large.high * ratio,
            source=f"the steps at {large.global_batch_size:,} ({large.source})",
            basis="extrapolated",
        )
    # The range assumes that a larger batch never needs fewer samples or more steps.
    if recipe == "open_hypothesis":
        return Estimate(
            samples=_MIN_STEPS * (batch + _SATURATION),
            low=max(small.low, large.low * batch / large.global_batch_size),
            high=min(large.high, small.high * batch / small.global_batch_size),
            source=f"the hypothesis of {_MIN_STEPS} * (1 + {_SATURATION:,} / batch) steps, "
            f"through two points ({small.global_batch_size:,} and {large.global_batch_size:,})",
            basis="extrapolated",
        )
    for point in points:
        if point.global_batch_size == batch:
            return Estimate(point.samples, point.low, point.high, point.source)
    before, after = next(pair for pair in pairwise(points) if batch < pair[1].global_batch_size)
    share = share_between(batch, before.global_batch_size, after.global_batch_size)
    return Estimate(
        samples=geometric(before.samples, after.samples, share),
        low=geometric(before.low, after.low, share),
        high=geometric(before.high, after.high, share),
        source=f"interpolated, {before.global_batch_size:,} to {after.global_batch_size:,}",
    )


def recipe_of(config: RunConfig) -> Recipe:
    """Return the recipe that estimates how many samples a config needs.

    The choice depends on the config's optimizer.
    """
    if config.mlperf.division == "closed" or config.optim.name == "lamb":
        return "closed_lamb"
    if config.schedule.end_learning_rate > 0 and config.optim.epsilon != _ADAM_EPSILON:
        return "open_hypothesis"  # even if its betas are those of a published point
    betas = config.optim.beta_1, config.optim.beta_2
    named: dict[tuple[float, float], Recipe] = {
        _ADAM_BETAS: "open_adam",
        _ADAMW_BETAS: "open_adamw",
    }
    return named.get(betas, "open_hypothesis")


Accelerator = Literal["a100", "h100", "h200"]
ACCELERATORS: tuple[Accelerator, ...] = get_args(Accelerator)

# The largest micro-batches, in sequences. NVIDIA ran 56 without padding in 80 GB, and 48 packs of
# about two sequences, which is the limit for an H100 and several H200. The 448 are computed.
_MAX_SEQUENCES = {"a100": 56, "h100": 96, "h200": 96}
_MAX_ON_ONE_GPU = {"h200": 448}


@dataclass(frozen=True, slots=True)
class _BatchSize:
    """A row of `batch_sizes.csv`: a global batch and the number of accelerators that used it."""

    accelerators: int
    global_batch_size: int


def choose_batch(ranks: int, accelerator: Accelerator) -> tuple[int, int]:
    """Return each rank's sequences per micro-batch and micro-batches per update.

    The global batch is interpolated between the rows of `batch_sizes.csv` on a logarithmic scale.
    Each rank gets the nearest whole number of sequences. They are split into micro-batches that are
    known to fit in memory. Raises ConfigError if there are more ranks than the largest batch of the
    closed division has sequences.
    """
    if ranks > CLOSED_MOST_BATCH:
        problem = (
            f"results in {ranks:,} ranks, but a batch has at most {CLOSED_MOST_BATCH:,} sequences"
        )
        raise ConfigError("--nodes", problem, f"use at most {CLOSED_MOST_BATCH:,} ranks")
    sizes = shipped_rows("batch_sizes.csv", _BatchSize, accelerator=accelerator)
    known = min(max(ranks, sizes[0].accelerators), sizes[-1].accelerators)
    low, high = next(pair for pair in pairwise(sizes) if known <= pair[1].accelerators)
    share = share_between(known, low.accelerators, high.accelerators)
    batch = geometric(low.global_batch_size, high.global_batch_size, share)
    each = min(max(1, round(batch / ranks)), CLOSED_MOST_BATCH // ranks)
    max_sequences = _MAX_SEQUENCES[accelerator]
    if ranks == 1:
        max_sequences = _MAX_ON_ONE_GPU.get(accelerator, max_sequences)
    micro_batches = math.ceil(each / max_sequences)
    return max(1, round(each / micro_batches)), micro_batches
