"""Samples that a recipe needs to reach masked-LM accuracy 0.720 at a global batch.

`samples_points.csv` holds published points. Between two points of a recipe the logarithm of the
samples is a straight line over the logarithm of the batch. Beyond them nothing is known: a smaller
batch takes the samples of the smallest point, a larger one the steps of the largest. Neither can
need more, as long as samples do not fall and steps do not rise with the batch. No torch.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

from bert_tools.plan.shipped import geometric, share_between, shipped_rows

# LAMB with the closed division's published sets (`published_sets.csv`); Samsung's Adam; MosaicML's
# AdamW without dropout; the line through the latter two, which has no third point.
Recipe = Literal["closed_lamb", "open_adam", "open_adamw", "open_hypothesis"]

# steps = _LEAST_STEPS * (1 + _SATURATION / batch): through MosaicML's point and Samsung's.
_LEAST_STEPS, _SATURATION = 145, 3_900

# Where a number of samples comes from; between two published points it counts as published.
Basis = Literal["published", "extrapolated"]


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
