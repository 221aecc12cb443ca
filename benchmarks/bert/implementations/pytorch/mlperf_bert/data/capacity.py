"""Compute capacities for the tokens, sequences and masked positions of a run's micro-batches.

A captured step (one that is recorded as a graph) is replayed with the shapes of its capture. Its
batches are therefore padded to a capacity, which is an upper limit for their sizes. Capacities are
computed from step plans before the run. A plan needs only the length index, so computing capacities
reads no samples.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Self

import numpy as np

from mlperf_bert.data.balance import StepPlan, StepPlanner
from mlperf_bert.data.sampler import Int64Array

RISK = 0.01  # probability that a bound is too low for at least one step of the run
LADDER_CAPACITIES = 12
TOKEN_MULTIPLE = 16  # so that FP8 transposes need no zero padding
PLANNED_STEPS = 256  # number of first steps that are planned, with a bound for later ones
WASTE = 0.01  # fraction of padding tokens above which another capacity is added, with its own graph


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan:
    """Upper limits for the tokens, sequences and masked positions of one micro-batch."""

    tokens: int
    sequences: int
    masked: int

    @classmethod
    def of_sizes(cls, sizes: Int64Array, num_steps: int) -> Self:
        """Compute the capacity for a run of `num_steps` steps.

        `sizes` are the results of `micro_batch_sizes` for some steps, int64 [3, steps, R * A]. If
        these steps are all steps of the run, every step fits into the capacity. Otherwise the
        capacity is a statistical bound from these steps, and a later step may not fit.
        """
        exact = sizes.shape[1] >= num_steps
        tokens, sequences, masked = (
            int(size.max()) if exact else _bound(size.max(axis=1), num_steps) for size in sizes
        )
        return cls(tokens=tokens, sequences=sequences, masked=masked)


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticShape:
    """All sizes of a micro-batch that is padded to a capacity (`data/batch.py`).

    The `sequences` slots for real sequences are followed by `dummies` slots for padding tokens.
    Both numbers are constant. Unused slots have empty sequences.
    """

    tokens: int
    sequences: int
    masked: int
    max_seqlen: int
    max_masked: int  # largest number of masked positions of one sequence

    @classmethod
    def of(cls, capacity: CapacityPlan, *, max_seqlen: int, max_masked: int) -> Self:
        """Return the shape of a capacity, limited to the tokens that fit into its sequences.

        The number of tokens is rounded up to a multiple of TOKEN_MULTIPLE.
        """
        tokens = min(capacity.tokens, capacity.sequences * max_seqlen)
        return cls(
            tokens=-(-tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE,
            sequences=capacity.sequences,
            masked=min(capacity.masked, capacity.sequences * max_masked),
            max_seqlen=max_seqlen,
            max_masked=max_masked,
        )

    @property
    def dummies(self) -> int:
        """Smallest number of dummy slots that have room for all tokens of the shape.

        Each slot has room for `max_seqlen` tokens.
        """
        return -(-self.tokens // self.max_seqlen)

    def least_padding(self, sequences: Int64Array) -> Int64Array:
        """Return the number of padding tokens that micro-batches with `sequences` sequences need.

        The last layer computes only some tokens (`last_rows`), which are the first token of each
        slot and the used and unused masked positions. It assigns each of these tokens to a
        non-empty sequence, which can have at most 1 + `max_masked` of them. The last non-empty
        sequence also gets the first tokens of the empty slots. If there are too few non-empty
        sequences, some empty slots for real sequences must get one padding token each. The result
        has the shape of `sequences`.
        """
        rows = self.masked + self.sequences
        filled = max(-(-rows // (1 + self.max_masked)), self.sequences - self.max_masked)
        return np.where(sequences < self.sequences, np.maximum(filled - sequences, 1), 0)

    def holds(self, *, tokens: Int64Array, sequences: Int64Array, masked: Int64Array) -> bool:
        """Return True if all micro-batches fit into this shape.

        The three arrays have the same shape and one element per micro-batch.
        """
        fits = (sequences <= self.sequences) & (masked <= self.masked)
        return bool((fits & (tokens + self.least_padding(sequences) <= self.tokens)).all())


def micro_batch_sizes(plan: StepPlan) -> Int64Array:
    """Return the sizes of all micro-batches of a step, int64 [3, R * A].

    The three rows are the numbers of tokens, sequences and masked positions.
    """
    return np.stack([plan.num_tokens, plan.counts, plan.num_masked]).reshape(3, -1)


def _bound(maxima: Int64Array, num_steps: int) -> int:
    """Estimate a bound that the maximum over `num_steps` steps exceeds in about 1% of runs.

    `maxima` contains the maximum of each planned step. The function fits a Pearson type III
    distribution to these maxima. As the skewness grows, the tail of this distribution changes from
    normal to exponential. The bound is the quantile 1 - RISK / num_steps, computed by Wilson and
    Hilferty's formula (PNAS 17, 1931). The fitted skewness is raised by two standard errors to
    allow for its estimation error.
    """
    count, deviation = len(maxima), float(maxima.std())
    if not deviation:
        return int(maxima.max())
    standardized = (maxima - maxima.mean()) / deviation
    skewness = max(0.0, float((standardized**3).mean())) + 2 * math.sqrt(6 / count)
    normal = -NormalDist().inv_cdf(RISK / num_steps)
    quantile = ((1 + skewness * normal / 6 - skewness**2 / 36) ** 3 - 1) * 2 / skewness
    return max(int(maxima.max()), math.ceil(float(maxima.mean()) + quantile * deviation))


def plan_shapes(
    planner: StepPlanner, num_steps: int, *, max_seqlen: int, max_masked: int
) -> tuple[StaticShape, ...]:
    """Compute the shapes for all micro-batches of a run of `num_steps` steps, smallest first.

    Args:
        planner: creates the step plans of the run.
        num_steps: number of steps of the run.
        max_seqlen: largest number of tokens of a sequence.
        max_masked: largest number of masked positions of a sequence.
    """
    steps = range(1, min(num_steps, PLANNED_STEPS) + 1)
    sizes = np.stack([micro_batch_sizes(planner.plan(step)) for step in steps], axis=1)
    return shapes_of_sizes(sizes, num_steps, max_seqlen=max_seqlen, max_masked=max_masked)


def shapes_of_sizes(
    sizes: Int64Array, num_steps: int, *, max_seqlen: int, max_masked: int
) -> tuple[StaticShape, ...]:
    """Compute the shapes of a run from the sizes of some steps' micro-batches, smallest first.

    `sizes` are the results of `micro_batch_sizes` for these steps, int64 [3, steps, R * A].
    """
    largest = CapacityPlan.of_sizes(sizes, num_steps)
    # If counts differ, some slots have no sequence. Together these need a few padding tokens.
    largest_shape = StaticShape.of(largest, max_seqlen=max_seqlen, max_masked=max_masked)
    padding = int(largest_shape.least_padding(sizes[1]).max())
    largest = replace(largest, tokens=largest.tokens + padding)
    # All ranks use the capacity that the largest micro-batch of the step needs (`shape_of`).
    tokens, _, masked = sizes.max(axis=2)
    shapes = (
        StaticShape.of(capacity, max_seqlen=max_seqlen, max_masked=max_masked)
        for capacity in _fewest_capacities(largest, tokens + padding, masked)
    )
    # If several are rounded to the same number of tokens, keep the last, because it has the most
    # masked positions.
    return tuple({shape.tokens: shape for shape in shapes}.values())


def shape_of(plan: StepPlan, shapes: tuple[StaticShape, ...]) -> StaticShape | None:
    """Return the smallest of `shapes` that fits all micro-batches of a step, or None if none does.

    `shapes` are in ascending order. The function checks the micro-batches of all ranks, because
    NCCL requires all ranks to replay graphs that were captured together.
    """
    return _first_that_holds(micro_batch_sizes(plan), shapes)


def captured_waste(sizes: Int64Array, shapes: tuple[StaticShape, ...]) -> float:
    """Return the number of padding tokens per real token in a captured run.

    `sizes` are the results of `micro_batch_sizes` for some steps, int64 [3, steps, R * A]. A step
    that fits into no shape runs without padding. The function counts it as if all its micro-batches
    were as large as its largest one.
    """
    padded = [
        shape.tokens if (shape := _first_that_holds(step, shapes)) else step[0].max()
        for step in sizes.swapaxes(0, 1)
    ]
    return float(np.mean(padded) / sizes[0].mean() - 1)


def _first_that_holds(sizes: Int64Array, shapes: tuple[StaticShape, ...]) -> StaticShape | None:
    tokens, sequences, masked = sizes
    fitting = (
        shape for shape in shapes if shape.holds(tokens=tokens, sequences=sequences, masked=masked)
    )
    return next(fitting, None)


def _fewest_capacities(
    largest: CapacityPlan, tokens: Int64Array, masked: Int64Array
) -> tuple[CapacityPlan, ...]:
    """Choose the smallest number of capacities that keeps the padding below WASTE.

    `tokens` and `masked` contain the sizes of the largest micro-batches of each step. The function
    returns at most LADDER_CAPACITIES capacities, even if the padding stays above WASTE.
    """
    for number in range(1, LADDER_CAPACITIES + 1):
        capacities = _by_quantiles(largest, tokens, masked, number)
        limits = np.array([capacity.tokens for capacity in capacities])
        if limits[np.searchsorted(limits, tokens)].sum() <= (1 + WASTE) * tokens.sum():
            break
    return capacities


def _by_quantiles(
    largest: CapacityPlan, tokens: Int64Array, masked: Int64Array, number: int
) -> tuple[CapacityPlan, ...]:
    """Return `number` capacities in ascending order, or fewer if some are equal.

    The largest capacity is `largest`. The second largest is that of the largest planned step. All
    others are at quantiles of the number of tokens per step.
    """
    shares = np.arange(1, number) / max(number - 1, 1)
    limits = np.unique(np.quantile(tokens, shares, method="higher").astype(np.int64))
    smaller = (
        replace(largest, tokens=limit, masked=int(masked[tokens <= limit].max()))
        for limit in limits.tolist()
        if limit < largest.tokens
    )
    return *smaller, largest
