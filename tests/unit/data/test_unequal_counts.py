"""Unequal counts: slots are never empty, and more even than longest-first dealing makes them."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.data.balance import (
    RESOLUTION,
    Balance,
    CostModel,
    Float64Array,
    StepPlanner,
    even_slots,
)
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.data.sampler import UniformSampler


def loads(cost: Float64Array, num_slots: int) -> Float64Array:
    order, slot = even_slots(cost, num_slots)
    return np.bincount(slot, weights=cost[order], minlength=num_slots)


def largest_load_longest_first(cost: Float64Array, num_slots: int) -> float:
    load = [0.0] * num_slots
    for value in sorted(cost.tolist(), reverse=True):
        heapq.heapreplace(load, load[0] + value)
    return max(load)


def published_costs(num_slots: int, mean_count: int, cost: CostModel) -> list[Float64Array]:
    """Ten global batches as the quantile sampler draws them, as many quantiles as a slot has."""
    published = wikipedia_lengths()
    generator = np.random.default_rng(num_slots)
    ends = np.cumsum(published.counts)
    shares = generator.random((10, num_slots, mean_count)) + np.arange(mean_count)
    ranks = (shares / mean_count * published.num_sequences).astype(np.int64)
    lengths = published.lengths[np.searchsorted(ends, ranks, side="right")]
    return list(cost(lengths.reshape(10, -1).astype(np.float64)))


@settings(max_examples=100, deadline=None)
@given(
    cost=st.lists(st.integers(1, 512) | st.floats(1e-3, 1e6), min_size=1, max_size=60),
    share=st.floats(0, 1),
)
def test_every_sample_once_and_no_slot_empty(cost: list[float], share: float) -> None:
    num_slots = max(1, round(share * len(cost)))
    order, slot = even_slots(np.array(cost), num_slots)
    assert sorted(order.tolist()) == list(range(len(cost)))
    assert (np.diff(np.array(cost)[order]) <= 0).all()
    assert set(slot.tolist()) == set(range(num_slots))


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 512), min_size=1, max_size=60), share=st.floats(0, 1))
def test_never_worse_than_longest_first(lengths: list[int], share: float) -> None:
    cost = np.array(lengths, dtype=np.float64)
    num_slots = max(1, round(share * len(cost)))
    assert loads(cost, num_slots).max() <= largest_load_longest_first(cost, num_slots)


def test_one_sample_above_all_others() -> None:
    assert loads(np.array([900.0, 1, 2, 3, 4, 5, 6, 7]), 3).max() == 900


# Equal counts reach 1.155 and 1.029 (row-wise longest first, quantiles of one sample a rank).
@pytest.mark.parametrize(("mean_count", "equal"), [(2, 1.155), (3, 1.029)])
def test_published_lengths_at_1024_ranks(mean_count: int, equal: float) -> None:
    imbalance = []
    for cost in published_costs(1024, mean_count, CostModel(linear=1.0, quadratic=0.0)):
        load = loads(cost, 1024)
        assert load.max() < largest_load_longest_first(cost, 1024)
        imbalance.append(load.max() / load.mean())
    assert np.mean(imbalance) - 1 < (equal - 1) / 3


def test_fractional_costs_lose_no_more_than_their_steps() -> None:
    cost_model = CostModel(linear=0.37, quadratic=0.37 / 6144)
    for cost in published_costs(64, 4, cost_model):
        counts = np.bincount(even_slots(cost, 64)[1])
        rounding = counts.max() * cost.max() / RESOLUTION
        assert loads(cost, 64).max() < largest_load_longest_first(cost, 64) + rounding


def test_plan_with_unequal_counts_keeps_the_exact_mean() -> None:
    lengths = np.random.default_rng(1).integers(5, 512, 600).astype(np.uint16)
    masked = np.maximum(1, lengths // 7).astype(np.uint8)
    plan = StepPlanner(
        UniformSampler(len(lengths), 48, seed=9),
        lengths,
        masked,
        world_size=8,
        grad_accum_steps=2,
        balance=Balance(policy="presort_global", counts="unequal"),
    ).plan(3)
    assert len(set(plan.counts.ravel().tolist())) > 1
    drawn = UniformSampler(len(lengths), 48, seed=9).global_batch(3)
    assert sorted(plan.sample_ids.tolist()) == sorted(drawn.tolist())
    for rank, forward in np.ndindex(8, 2):
        ids = plan.ids_of(rank, forward)
        assert plan.num_tokens[rank, forward] == lengths[ids].sum()
    np.testing.assert_array_equal(plan.nsp_denominators, 48 / 8)
    np.testing.assert_array_equal(plan.mlm_denominators, masked[drawn].sum() / 8)
