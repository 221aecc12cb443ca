"""Step plans: nothing lost, exact denominators, imbalance by definition, little private memory."""

import tracemalloc
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.config.sections import BalancePolicy, CountsPerRank, SamplerName
from mlperf_bert.data.balance import Balance, StepPlanner
from mlperf_bert.data.sampler import make_sampler
from plan_cases import planner_of

LENGTHS = np.random.default_rng(1).integers(5, 512, 1000).astype(np.uint16)
MASKED = np.maximum(1, LENGTHS // 7).astype(np.uint8)
SHAPES = st.sampled_from([(1, 1), (4, 1), (2, 3), (8, 2), (1, 48), (24, 1)])


def planner(world_size, accumulation, sampler="uniform", **options):
    return planner_of(
        LENGTHS,
        48,
        sampler,
        masked_counts=MASKED,
        world_size=world_size,
        grad_accum_steps=accumulation,
        **options,
    )


@given(
    shape=SHAPES,
    step=st.integers(1, 60),
    sampler=st.sampled_from(get_args(SamplerName)),
    policy=st.sampled_from(get_args(BalancePolicy)),
    counts=st.sampled_from(get_args(CountsPerRank)),
)
@settings(max_examples=100, deadline=None)
def test_a_plan_is_the_global_batch_cut_into_forwards(policy, counts, shape, step, sampler):
    per_node = 2 if shape[0] % 2 == 0 else 1
    balance = Balance(policy=policy, ranks_per_node=per_node, counts=counts)
    made, same = (planner(*shape, sampler, balance=balance) for _ in "ab")
    made.plan(step + 7)  # any step is planned directly
    plan, direct = made.plan(step), same.plan(step)
    assert np.array_equal(direct.sample_ids, plan.sample_ids)
    assert np.array_equal(direct.counts, plan.counts)
    batch = made.sampler.global_batch(step)
    other_seed = planner(*shape, sampler, seed=4).sampler
    assert not np.array_equal(other_seed.global_batch(step), batch)
    assert np.array_equal(plan.drawn_ids.ravel(), batch)
    assert np.array_equal(np.sort(plan.sample_ids), np.sort(batch))
    micro_batches = {slot: plan.ids_of(*slot) for slot in np.ndindex(plan.counts.shape)}
    assert np.array_equal(np.concatenate(list(micro_batches.values())), plan.sample_ids)
    if counts == "equal" or policy != "presort_global":
        assert (plan.counts == len(batch) // plan.counts.size).all()
    for slot, ids in micro_batches.items():
        assert len(ids) == plan.counts[slot] >= 1  # without a sample a rank has no gradient
        assert LENGTHS[ids].sum() == plan.num_tokens[slot]
        assert MASKED[ids].sum() == plan.num_masked[slot]
    per_rank = plan.num_tokens.sum(axis=1)
    assert plan.imbalance_tokens == pytest.approx(per_rank.max() / per_rank.mean())
    # Summed over micro-batches, averaged over ranks: losses over denominators are their mean.
    losses = np.random.default_rng(step).random(plan.counts.shape)
    for denominators, total in (
        (plan.mlm_denominators, MASKED[batch].sum()),
        (plan.nsp_denominators, len(batch)),
    ):
        mean = (losses / denominators).sum(axis=1).mean()
        assert mean == pytest.approx(losses.sum() / total)


def test_per_rank_denominators_are_the_forwards_own():
    plan = planner(4, 3, loss_normalization="per_rank").plan(1)
    own = MASKED[plan.drawn_ids].sum(axis=2, dtype=float)
    assert np.array_equal(plan.mlm_denominators, own * 3)
    assert np.array_equal(plan.nsp_denominators, np.full((4, 3), 4.0 * 3))


@pytest.mark.parametrize("sampler", get_args(SamplerName)[:3])
def test_planning_takes_no_memory_for_the_whole_set(sampler):
    """Of 16 million samples; the largest published run has ten times as many."""
    num_samples, longest = 2**24, 512
    lengths = np.tile(np.arange(1, longest + 1, dtype=np.uint16), num_samples // longest)
    order = np.arange(num_samples, dtype=np.uint32).reshape(-1, longest).T.ravel()
    histogram = (0, *[num_samples // longest] * longest)
    tracemalloc.start()
    try:
        made = make_sampler(
            sampler,
            order_by_length=order,
            length_histogram=histogram,
            global_batch_size=192 * 4,
            seed=1,
        )
        balance = Balance(policy="presort_global", counts="unequal")
        steps = StepPlanner(made, lengths, lengths, world_size=192, balance=balance)
        for step in (1, 2, 3):
            steps.plan(step)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20 < lengths.nbytes
    finally:
        tracemalloc.stop()
