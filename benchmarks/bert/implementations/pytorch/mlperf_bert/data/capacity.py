"""How much room every forward of a run needs: capacities of tokens, sequences, masked positions.

A captured step is replayed with the shapes it was captured with, so its batches are padded to a
capacity. Capacities come from step plans, before the run: a plan needs the length index alone, so
no sample is read.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.data.balance import StepPlan, StepPlanner
from mlperf_bert.data.sampler import Int64Array

CapacityBasis = Literal["exact", "bound"]

RISK = 0.01  # that a bound is too low for one step or more of the run
LADDER_CAPACITIES = 12
TOKEN_MULTIPLE = 16  # so that transposes for FP8 need no zeros
LADDER_STEP = 0.02  # of the next larger capacity
PLANNED_STEPS = 256  # of a longer run: its other steps have a bound
WASTE = 0.01  # of tokens, above which more than one capacity is worth its graph


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan:
    """Room of one forward.

    `basis` is "exact" where every step of the run was planned, so that all of them fit, and
    "bound" where it was estimated from some of them: then a step may still not fit.
    """

    tokens: int
    sequences: int
    masked: int
    basis: CapacityBasis

    @classmethod
    def of_sizes(cls, sizes: "ForwardSizes", num_steps: int) -> Self:
        """Capacities for a run of `num_steps`: exact where `sizes` has that many, else a bound."""
        exact = len(sizes.tokens) >= num_steps
        of_steps = (sizes.tokens, sizes.sequences, sizes.masked)
        tokens, sequences, masked = (
            int(size.max()) if exact else _bound(size.max(axis=1), num_steps) for size in of_steps
        )
        basis: CapacityBasis = "exact" if exact else "bound"
        return cls(tokens=tokens, sequences=sequences, masked=masked, basis=basis)

    def within(self, *, longest: int, most_masked: int) -> Self:
        """The same, but no more than its sequences can have: tokens and masked positions of one."""
        return replace(
            self,
            tokens=min(self.tokens, self.sequences * longest),
            masked=min(self.masked, self.sequences * most_masked),
        )


@dataclass(frozen=True, slots=True)
class CapacityLadder:
    """Several capacities, the smallest first, for samplers whose steps differ in size.

    Each has 2 % less room for tokens and masked positions than the next; sequences are the same.
    `plan balance` reckons with it; a run chooses its own (`plan_shapes`).
    """

    capacities: tuple[CapacityPlan, ...]

    @classmethod
    def below(cls, largest: CapacityPlan) -> Self:
        """Twelve capacities, the last of which is `largest`."""
        shares = [(1 - LADDER_STEP) ** number for number in range(LADDER_CAPACITIES)]
        return cls(
            tuple(
                CapacityPlan(
                    tokens=math.ceil(share * largest.tokens),
                    sequences=largest.sequences,
                    masked=math.ceil(share * largest.masked),
                    basis=largest.basis,
                )
                for share in reversed(shares)
            )
        )

    def token_waste(self, sizes: "ForwardSizes") -> float:
        """Mean capacity over mean tokens, less 1, where each forward takes the smallest it can.

        What none holds runs without padding.
        """
        numbers = self._numbers(sizes.tokens, sizes.masked)
        room = np.array([capacity.tokens for capacity in self.capacities])
        chosen = room[np.minimum(numbers, len(room) - 1)]
        padded = np.where(numbers < len(room), chosen, sizes.tokens)
        return float(padded.sum() / sizes.tokens.sum() - 1)

    def _numbers(self, num_tokens: Int64Array, num_masked: Int64Array) -> Int64Array:
        """The number of the smallest capacity that holds each; how many there are, where none."""
        by_tokens = np.searchsorted([each.tokens for each in self.capacities], num_tokens)
        by_masked = np.searchsorted([each.masked for each in self.capacities], num_masked)
        return np.maximum(by_tokens, by_masked)


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticShape:
    """Every size of a forward that is padded to a capacity (`data/batch.py`).

    Behind the `sequences` that may be real there are `dummies`, which hold the padding tokens; how
    many of both there are is a constant, and those that are not needed are empty.
    """

    tokens: int
    sequences: int
    masked: int
    max_seqlen: int
    max_masked: int  # of one sequence

    @classmethod
    def of(cls, capacity: CapacityPlan, *, max_seqlen: int, max_masked: int) -> Self:
        """The shape with at least that room; tokens are a multiple of TOKEN_MULTIPLE."""
        within = capacity.within(longest=max_seqlen, most_masked=max_masked)
        return cls(
            tokens=-(-within.tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE,
            sequences=within.sequences,
            masked=within.masked,
            max_seqlen=max_seqlen,
            max_masked=max_masked,
        )

    @property
    def dummies(self) -> int:
        """Enough for any padding: sequences of `max_seqlen` that would fill all tokens."""
        return -(-self.tokens // self.max_seqlen)

    def holds(self, *, tokens: Int64Array, sequences: Int64Array, masked: Int64Array) -> bool:
        """Whether forwards of those sizes fit, arrays of one form.

        A sequence slot that is not used takes a padding token, as no slot that may be real is
        empty.
        """
        unused = self.sequences - sequences
        fits = (unused >= 0) & (tokens + unused <= self.tokens) & (masked <= self.masked)
        return bool(fits.all())


class ForwardSizes:
    """Sizes of every forward of some steps: int64 [steps, R * A] each."""

    def __init__(self) -> None:
        self._of_steps: list[NDArray[Any]] = []

    def add(self, plan: StepPlan) -> None:
        """Note the sizes of a step."""
        of_step = np.stack([plan.num_tokens, plan.counts, plan.num_masked])
        self._of_steps.append(of_step.reshape(3, -1))

    @property
    def tokens(self) -> Int64Array:
        """Tokens of every forward."""
        return np.stack([of_step[0] for of_step in self._of_steps])

    @property
    def sequences(self) -> Int64Array:
        """Sequences of every forward."""
        return np.stack([of_step[1] for of_step in self._of_steps])

    @property
    def masked(self) -> Int64Array:
        """Masked positions of every forward."""
        return np.stack([of_step[2] for of_step in self._of_steps])


def waste(capacity: int, sizes: Int64Array) -> float:
    """Padding for each real token or position: capacity over mean size, less 1."""
    return float(capacity / sizes.mean() - 1)


def _bound(maxima: Int64Array, num_steps: int) -> int:
    """What the largest of `num_steps` steps exceeds in about 1 % of such runs, from some steps.

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
    """Shapes for the forwards of all ranks, the smallest first, in a run of `num_steps` steps.

    Args:
        max_seqlen: tokens of a sequence at most.
        max_masked: masked positions of a sequence at most.
    """
    sizes = ForwardSizes()
    for step in range(1, min(num_steps, PLANNED_STEPS) + 1):
        sizes.add(planner.plan(step))
    largest = CapacityPlan.of_sizes(sizes, num_steps)
    # Unequal counts: a slot without a sequence takes a padding token.
    free = int(largest.sequences - sizes.sequences.min())
    largest = replace(largest, tokens=largest.tokens + free)
    # A step takes the capacity that its largest forward needs, on all ranks (`shape_of`).
    capacities = _fewest_capacities(largest, sizes.tokens.max(axis=1), sizes.masked.max(axis=1))
    shapes = (
        StaticShape.of(capacity, max_seqlen=max_seqlen, max_masked=max_masked)
        for capacity in capacities
    )
    # Of those that are rounded to the same number of tokens, the last: it has the most masked.
    return tuple({shape.tokens: shape for shape in shapes}.values())


def shape_of(plan: StepPlan, shapes: tuple[StaticShape, ...]) -> StaticShape | None:
    """The first of `shapes`, smallest first, that holds every forward of a step; None: none does.

    Of all ranks: NCCL wants them to replay graphs that were captured together.
    """
    sizes = {"tokens": plan.num_tokens, "sequences": plan.counts, "masked": plan.num_masked}
    return next((shape for shape in shapes if shape.holds(**sizes)), None)


def _fewest_capacities(
    largest: CapacityPlan, tokens: Int64Array, masked: Int64Array
) -> tuple[CapacityPlan, ...]:
    """One capacity, or as many as bring the waste under WASTE: LADDER_CAPACITIES at most.

    `tokens` and `masked` are the sizes of each step's largest forwards.
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
    """`number` capacities: the largest, that of the largest step seen, and others at quantiles.

    Fewer where some are the same.
    """
    shares = np.arange(1, number) / max(number - 1, 1)
    limits = np.unique(np.quantile(tokens, shares, method="higher").astype(np.int64))
    smaller = (
        replace(largest, tokens=limit, masked=int(masked[tokens <= limit].max()))
        for limit in limits.tolist()
        if limit < largest.tokens
    )
    return *smaller, largest
