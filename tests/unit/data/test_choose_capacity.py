"""Shapes of a run's forwards: they hold its steps, and waste little."""

import numpy as np
import pytest

from mlperf_bert.config.sections import SamplerName
from mlperf_bert.data.balance import Balance, StepPlanner
from mlperf_bert.data.capacity import (
    LADDER_CAPACITIES,
    PLANNED_STEPS,
    WASTE,
    ForwardSizes,
    plan_shapes,
    shape_of,
)
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.data.sampler import make_sampler

LENGTHS = wikipedia_lengths().draw_evenly(20_000, 1).astype(np.uint16)
MASKED = np.clip(np.rint(LENGTHS * 0.15), 1, 76).astype(np.uint8)
LIMITS = {"max_seqlen": 512, "max_masked": 76}


def planner(
    sampler: SamplerName, local_batch_size: int, world_size: int = 1, balance: Balance | None = None
) -> StepPlanner:
    histogram = np.bincount(LENGTHS, minlength=513).tolist()
    return StepPlanner(
        make_sampler(
            sampler,
            order_by_length=np.argsort(LENGTHS, kind="stable").astype(np.uint32),
            length_histogram=histogram,
            global_batch_size=world_size * local_batch_size,
            seed=3,
            quantiles="auto",
        ),
        LENGTHS,
        MASKED,
        world_size=world_size,
        balance=balance or Balance(policy="none"),
    )


@pytest.mark.parametrize("local_batch_size", [2, 16, 64])
def test_a_short_run_always_fits(local_batch_size: int) -> None:
    steps = planner("uniform", local_batch_size)
    shapes = plan_shapes(steps, 40, **LIMITS)
    assert 1 < len(shapes) <= LADDER_CAPACITIES
    assert [shape.tokens for shape in shapes] == sorted({shape.tokens for shape in shapes})
    for step in range(1, 41):
        assert shape_of(steps.plan(step), shapes) is not None


def test_even_batches_need_one_shape() -> None:
    steps = planner("quantile", 64)
    (shape,) = plan_shapes(steps, 100, **LIMITS)
    sizes = ForwardSizes()
    for step in range(1, 101):
        sizes.add(steps.plan(step))
    assert sizes.tokens.max() <= shape.tokens <= (1 + WASTE) * sizes.tokens.mean() + 16


def test_ranks_that_differ_cost_no_capacity_that_is_never_used() -> None:
    steps = planner("uniform", 4, world_size=32)
    shapes = plan_shapes(steps, 60, **LIMITS)
    used = {shape_of(steps.plan(step), shapes) for step in range(1, 61)}
    assert used == set(shapes)


def test_unequal_counts_leave_a_token_for_each_empty_slot() -> None:
    balance = Balance(policy="presort_global", counts="unequal")
    steps = planner("uniform", 3, world_size=16, balance=balance)
    largest = plan_shapes(steps, 30, **LIMITS)[-1]
    for step in range(1, 31):
        assert shape_of(steps.plan(step), (largest,)) is largest


def test_of_a_long_run_some_steps_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, planned = planner("quantile", 16), []
    plan = steps.plan
    monkeypatch.setattr(steps, "plan", lambda step: planned.append(step) or plan(step))
    plan_shapes(steps, 10**6, **LIMITS)
    assert planned == list(range(1, PLANNED_STEPS + 1))
