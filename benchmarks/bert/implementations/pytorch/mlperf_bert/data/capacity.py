"""Capacities of tokens, sequences and masked positions for every micro-batch of a run.

A captured step is replayed with the shapes it was captured with, so its batches are padded to a
capacity. Capacities come from step plans, before the run: a plan needs only the length index, so no
sample is read.
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
TOKEN_MULTIPLE = 16  # so that FP8 transposes need no zeros
PLANNED_STEPS = 256  # steps planned of a longer run; the others have a bound
WASTE = 0.01  # waste of tokens above which another capacity is worth its graph


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan:
    """Room of one micro-batch."""

    tokens: int
    sequences: int
    masked: int

    @classmethod
    def of_sizes(cls, sizes: Int64Array, num_steps: int) -> Self:
        """Capacities for a run of `num_steps`: exact if `sizes` has that many, so that all fit.

        Otherwise they are a bound from some steps, so a step may still not fit. `sizes` are those
        of the steps' micro-batches, int64 [3, steps, R * A] (`micro_batch_sizes`).
        """
        exact = sizes.shape[1] >= num_steps
        tokens, sequences, masked = (
            int(size.max()) if exact else _bound(size.max(axis=1), num_steps) for size in sizes
        )
        return cls(tokens=tokens, sequences=sequences, masked=masked)


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticShape:
    """Every size of a micro-batch that is padded to a capacity (`data/batch.py`).

    After the `sequences` that may be real come `dummies`, which hold the padding tokens. Both
    numbers are constant, and sequences that are not needed are empty.
    """

    tokens: int
    sequences: int
    masked: int
    max_seqlen: int
    max_masked: int  # masked positions of one sequence

    @classmethod
    def of(cls, capacity: CapacityPlan, *, max_seqlen: int, max_masked: int) -> Self:
        """The shape with that room, or as much as its sequences can fill.

        Tokens are a multiple of TOKEN_MULTIPLE.
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
        """Dummies, enough for any padding: sequences of `max_seqlen` that fill all tokens."""
        return -(-self.tokens // self.max_seqlen)

    def least_padding(self, sequences: Int64Array) -> Int64Array:
        """Padding tokens that micro-batches of so many sequences need, in the same array shape.

        Each is a dummy in a slot that may be real. No sequence has more than 1 + `max_masked` rows
        in the last layer (`last_rows`): its first token, its masked positions, used or not, and in
        the last non-empty sequence the first tokens of the empty slots.
        """
        rows = self.masked + self.sequences
        filled = max(-(-rows // (1 + self.max_masked)), self.sequences - self.max_masked)
        return np.where(sequences < self.sequences, np.maximum(filled - sequences, 1), 0)

    def holds(self, *, tokens: Int64Array, sequences: Int64Array, masked: Int64Array) -> bool:
        """True if micro-batches of these sizes (arrays of one shape) fit, with padding."""
        fits = (sequences <= self.sequences) & (masked <= self.masked)
        return bool((fits & (tokens + self.least_padding(sequences) <= self.tokens)).all())


def micro_batch_sizes(plan: StepPlan) -> Int64Array:
    """Tokens, sequences and masked positions of every micro-batch of a step: int64 [3, R * A]."""
    return np.stack([plan.num_tokens, plan.counts, plan.num_masked]).reshape(3, -1)


def _bound(maxima: Int64Array, num_steps: int) -> int:
    """A bound, from some steps, that the largest of `num_steps` exceeds in about 1 % of runs.

    A Pearson type III distribution is fitted to the steps' maxima (its tail runs from a normal to
    an exponential one with the skewness), and its quantile 1 - RISK / num_steps taken by Wilson and
    Hilferty's formula (PNAS 17, 1931). The fitted skewness is raised by two standard errors.
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
    """Shapes for the micro-batches of all ranks, the smallest first, in a run of `num_steps` steps.

    Args:
        max_seqlen: most tokens of a sequence.
        max_masked: most masked positions of a sequence.
    """
    steps = range(1, min(num_steps, PLANNED_STEPS) + 1)
    sizes = np.stack([micro_batch_sizes(planner.plan(step)) for step in steps], axis=1)
    return shapes_of_sizes(sizes, num_steps, max_seqlen=max_seqlen, max_masked=max_masked)


def shapes_of_sizes(
    sizes: Int64Array, num_steps: int, *, max_seqlen: int, max_masked: int
) -> tuple[StaticShape, ...]:
    """Shapes from the sizes of some steps' micro-batches, int64 [3, steps, R * A]."""
    largest = CapacityPlan.of_sizes(sizes, num_steps)
    # Unequal counts leave slots without a sequence, which together need a token or two.
    largest_shape = StaticShape.of(largest, max_seqlen=max_seqlen, max_masked=max_masked)
    padding = int(largest_shape.least_padding(sizes[1]).max())
    largest = replace(largest, tokens=largest.tokens + padding)
    # A step takes the capacity that its largest micro-batch needs, on all ranks (`shape_of`).
    tokens, _, masked = sizes.max(axis=2)
    shapes = (
        StaticShape.of(capacity, max_seqlen=max_seqlen, max_masked=max_masked)
        for capacity in _fewest_capacities(largest, tokens + padding, masked)
    )
    # If several round to the same number of tokens, keep the last, which has the most masked.
    return tuple({shape.tokens: shape for shape in shapes}.values())


def shape_of(plan: StepPlan, shapes: tuple[StaticShape, ...]) -> StaticShape | None:
    """The smallest of `shapes` (ascending) that holds a step's micro-batches; None if none does.

    All ranks count, because NCCL requires them to replay graphs that were captured together.
    """
    return _first_that_holds(micro_batch_sizes(plan), shapes)


def captured_waste(sizes: Int64Array, shapes: tuple[StaticShape, ...]) -> float:
    """Padding for each real token, as in a captured run; `sizes` int64 [3, steps, R * A].

    A step that no shape holds runs without padding, as fast as its largest micro-batch.
    """
    padded = [
        shape.tokens if (shape := _first_that_holds(step, shapes)) else step[0].max()
        for step in sizes.swapaxes(0, 1)
    ]
    return float(np.mean(padded) / sizes[0].mean() - 1)


def _first_that_holds(sizes: Int64Array, shapes: tuple[StaticShape, ...]) -> StaticShape | None:
    tokens, sequences, masked = sizes
    of_all = {"tokens": tokens, "sequences": sequences, "masked": masked}
    return next((shape for shape in shapes if shape.holds(**of_all)), None)


def _fewest_capacities(
    largest: CapacityPlan, tokens: Int64Array, masked: Int64Array
) -> tuple[CapacityPlan, ...]:
    """One capacity, or enough to bring the waste under WASTE, at most LADDER_CAPACITIES.

    `tokens` and `masked` are the sizes of each step's largest micro-batches.
    """
    for number in range(1, LADDER_CAPACITIES + 1):
        capacities = _by_quantiles(largest, tokens, masked, number)
        room = np.array([capacity.tokens for capacity in capacities])
        if room[np.searchsorted(room, tokens)].sum() <= (1 + WASTE) * tokens.sum():
            break
    return capacities


def _by_quantiles(
    largest: CapacityPlan, tokens: Int64Array, masked: Int64Array, number: int
) -> tuple[CapacityPlan, ...]:
    """`number` capacities: the largest, that of the largest step seen, the others at quantiles.

    There are fewer if some are equal.
    """
    shares = np.arange(1, number) / max(number - 1, 1)
    limits = np.unique(np.quantile(tokens, shares, method="higher").astype(np.int64))
    smaller = (
        replace(largest, tokens=limit, masked=int(masked[tokens <= limit].max()))
        for limit in limits.tolist()
        if limit < largest.tokens
    )
    return *smaller, largest
