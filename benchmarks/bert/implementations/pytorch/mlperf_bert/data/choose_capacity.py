"""The shapes that a run's forwards are padded to, chosen before it from the plans of its steps.

No sample is read: a plan needs the length index alone.
"""

from dataclasses import replace

import numpy as np

from mlperf_bert.data.capacity import (
    LADDER_CAPACITIES,
    CapacityPlan,
    ForwardSizes,
    StaticShape,
)
from mlperf_bert.data.permutation import Int64Array
from mlperf_bert.data.step_plan import StepPlan, StepPlanner

PLANNED_STEPS = 256  # of a longer run: its other steps have a bound
WASTE = 0.01  # of tokens, above which more than one capacity is worth its graph


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
