"""Hyper-parameters of published sets for any global batch, the samples that they need, a batch.

The sets are those of MLPerf Training BERT, closed division (`published_sets.csv`). The lines
between them, and which of their points were tried: docs/reference/hyperparameters.md. How the
batch is chosen and cut into micro-batches: docs/concepts/scaling.md.

`samples_points.csv` holds published samples to masked-LM accuracy 0.720. Between two points of a
recipe the logarithm of the samples is a straight line over the logarithm of the batch. Beyond them
nothing is known: a smaller batch takes the samples of the smallest point, a larger one the steps of
the largest. Neither can need more, as long as samples do not fall and steps do not rise with the
batch. No torch.
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

_DIGITS = 4  # digits of an interpolated value: nobody measured more
_BETA_PLACES = 5  # after the point, as published betas have

_ADAM_BETAS, _ADAM_EPSILON = (0.8003575444254268, 0.8174653681457493), 1e-9
_ADAMW_BETAS = (0.9, 0.98)

# LAMB with the closed division's published sets (`published_sets.csv`); Samsung's Adam; MosaicML's
# AdamW without dropout; the line through the latter two, which has no third point.
Recipe = Literal["closed_lamb", "open_adam", "open_adamw", "open_hypothesis"]

# steps = _LEAST_STEPS * (1 + _SATURATION / batch): through MosaicML's point and Samsung's.
_LEAST_STEPS, _SATURATION = 145, 3_900

# Where a number of samples comes from; between two published points it counts as published.
Basis = Literal["published", "extrapolated"]


def shipped_rows(file: str, kind: type[Row], **chosen: str) -> tuple[Row, ...]:
    """Rows of a CSV file below `plan` as dataclasses: fields are columns of int, float or str.

    `chosen` keeps the rows with the given value in the given column.
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
    """Share of the way from `low` to `high` of a value, by logarithms: 0 .. 1 between them."""
    return math.log(value / low) / math.log(high / low)


def geometric(low: float, high: float, share: float) -> float:
    """The value at that share of the straight line in logarithms."""
    return low * math.exp(share * math.log(high / low))


def rounded(value: float, digits: int) -> float:
    """The value rounded to so many significant digits."""
    return float(f"{value:.{digits}g}")


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


@dataclass(frozen=True, slots=True)
class Estimate:
    """Samples (sequences) to the target: the mean of ten runs, and the range of most such means.

    At points of few entries `low` and `high` are a single run's standard deviation away; for open
    recipes they span the published means. `source` says in words where the number comes from.
    """

    samples: float
    low: float
    high: float
    source: str
    basis: Basis = "published"

    @property
    def in_words(self) -> str:
        """Basis and source."""
        return f"{self.basis}: {self.source}"


@dataclass(frozen=True, slots=True)
class SamplesPoint:
    """A published point of a recipe, made from `entries` MLPerf entries."""

    global_batch_size: int
    samples: float
    low: float
    high: float
    entries: int
    source: str


@cache
def samples_points(recipe: Recipe) -> tuple[SamplesPoint, ...]:
    """The points of a recipe, by batch."""
    if recipe == "open_hypothesis":
        return samples_points("open_adamw") + samples_points("open_adam")[:1]
    return shipped_rows("samples_points.csv", SamplesPoint, recipe=recipe)


def samples_to_target(global_batch_size: int, recipe: Recipe) -> Estimate:
    """Sequences that the recipe needs at this global batch, 1 at least."""
    batch = global_batch_size
    points = samples_points(recipe)
    small, large = points[0], points[-1]
    if batch < small.global_batch_size:  # at most its samples, at least its steps
        return Estimate(
            samples=small.samples,
            low=small.low * batch / small.global_batch_size,
            high=small.high,
            source=f"the samples at {small.global_batch_size:,} ({small.source})",
            basis="extrapolated",
        )
    if batch > large.global_batch_size:  # at most its steps, at least its samples
        ratio = batch / large.global_batch_size
        return Estimate(
            samples=large.samples * ratio,
            low=large.low,
            high=large.high * ratio,
            source=f"the steps at {large.global_batch_size:,} ({large.source})",
            basis="extrapolated",
        )
    if recipe == "open_hypothesis":  # bounds: samples do not fall and steps do not rise
        return Estimate(
            samples=_LEAST_STEPS * (batch + _SATURATION),
            low=max(small.low, large.low * batch / large.global_batch_size),
            high=min(large.high, small.high * batch / small.global_batch_size),
            source=f"a hypothesis: {_LEAST_STEPS} * (1 + {_SATURATION:,} / batch) steps, "
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

# Sequences of one micro-batch that somebody has run: NVIDIA 56 without padding on 80 GB, 48 packs
# of about two; this project 448 on an H200, alone. Of an H200 among others no more than of an H100.
_MOST_SEQUENCES = {"a100": 56, "h100": 96, "h200": 96}
_MOST_ALONE = {"h200": 448}


@dataclass(frozen=True, slots=True)
class _BatchSize:
    accelerators: int
    global_batch_size: int


def choose_batch(ranks: int, accelerator: Accelerator) -> tuple[int, int]:
    """Sequences per rank and forward, and micro-batches per update, for so many ranks.

    The global batch lies on straight lines of logarithms between those of `batch_sizes.csv`; each
    rank takes the nearest whole number of sequences, in micro-batches that memory is known to hold.
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
    micro_batches = math.ceil(each / most)
    return max(1, round(each / micro_batches)), micro_batches
