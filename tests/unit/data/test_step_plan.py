"""Step plans: nothing lost between ranks, exact denominators, imbalance by definition."""

from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.config.files import load_config
from mlperf_bert.config.sections import (
    BalanceModel,
    BalancePolicy,
    CountsPerRank,
    LossNormalization,
    SamplerName,
)
from mlperf_bert.data.balance import Balance, CostModel, StepPlan, StepPlanner
from mlperf_bert.data.sampler import Int64Array
from mlperf_bert.data.set_checks import plan_settings
from plan_cases import planner_of

LENGTHS = np.random.default_rng(1).integers(5, 512, 1000).astype(np.uint16)
MASKED = np.maximum(1, LENGTHS // 7).astype(np.uint8)
SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
SHAPES = st.sampled_from([(1, 1), (4, 1), (2, 3), (8, 2), (1, 48), (24, 1)])


def planner(
    world_size: int,
    accumulation: int,
    normalization: LossNormalization = "global",
    *,
    sampler: SamplerName = "uniform",
    policy: BalancePolicy = "none",
    counts: CountsPerRank = "equal",
    model: BalanceModel = "tokens",
) -> StepPlanner:
    return planner_of(
        LENGTHS,
        48,
        sampler,
        masked_counts=MASKED,
        world_size=world_size,
        grad_accum_steps=accumulation,
        loss_normalization=normalization,
        balance=Balance(
            policy=policy, ranks_per_node=2 if world_size % 2 == 0 else 1, counts=counts
        ),
        balance_model=model,
        cost=CostModel(linear=1.0, quadratic=1 / 6144),
    )


def ids_by_forward(plan: StepPlan) -> dict[tuple[int, int], Int64Array]:
    ranks, forwards = map(range, plan.counts.shape)
    return {slot: plan.ids_of(*slot) for slot in product(ranks, forwards)}


@given(shape=SHAPES, step=st.integers(1, 60), sampler=st.sampled_from(SAMPLERS))
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("counts", get_args(CountsPerRank))
@pytest.mark.parametrize("policy", get_args(BalancePolicy))
def test_a_plan_is_the_global_batch_cut_into_forwards(
    policy: BalancePolicy,
    counts: CountsPerRank,
    shape: tuple[int, int],
    step: int,
    sampler: SamplerName,
) -> None:
    made = planner(*shape, sampler=sampler, policy=policy, counts=counts)
    plan = made.plan(step)
    batch = made.sampler.global_batch(step)
    assert np.array_equal(plan.drawn_ids.ravel(), batch)
    forwards = ids_by_forward(plan)
    assert np.array_equal(np.concatenate(list(forwards.values())), plan.sample_ids)
    assert np.array_equal(np.sort(plan.sample_ids), np.sort(batch))
    for slot, ids in forwards.items():
        assert len(ids) == plan.counts[slot] >= 1
        assert LENGTHS[ids].sum() == plan.num_tokens[slot]
        assert MASKED[ids].sum() == plan.num_masked[slot]
    # Summed over forwards and averaged over ranks, counts over denominators make one.
    assert (plan.num_masked / plan.mlm_denominators).sum(axis=1).mean() == pytest.approx(1)
    assert (plan.counts / plan.nsp_denominators).sum(axis=1).mean() == pytest.approx(1)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_any_number_of_ranks_sees_the_same_global_batches(sampler: SamplerName) -> None:
    shapes = [(1, 1), (2, 1), (4, 3), (48, 1)]
    planners = [planner(*shape, sampler=sampler, policy="presort_global") for shape in shapes]
    for step in (1, 2, 40):
        alone, *others = (made.plan(step) for made in planners)
        for plan in others:
            assert np.array_equal(plan.drawn_ids.ravel(), alone.drawn_ids.ravel())
            assert np.array_equal(np.sort(plan.sample_ids), np.sort(alone.sample_ids))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("policy", get_args(BalancePolicy))
def test_any_step_is_planned_directly(sampler: SamplerName, policy: BalancePolicy) -> None:
    in_order = planner(4, 2, sampler=sampler, policy=policy)
    plans = [in_order.plan(step) for step in range(1, 31)]
    for step in (30, 7):
        direct = planner(4, 2, sampler=sampler, policy=policy).plan(step)
        assert np.array_equal(direct.sample_ids, plans[step - 1].sample_ids)
        assert np.array_equal(direct.counts, plans[step - 1].counts)


def test_the_balance_model_decides_what_is_even() -> None:
    def mean_imbalances(model: BalanceModel) -> tuple[float, float]:
        made = planner(2, 1, policy="presort_global", model=model)
        plans = [made.plan(step) for step in range(1, 41)]
        tokens = [plan.imbalance_tokens for plan in plans]
        return float(np.mean(tokens)), float(np.mean([plan.imbalance_cost for plan in plans]))

    by_tokens, by_cost = mean_imbalances("tokens"), mean_imbalances("cost")
    assert by_tokens[0] < by_cost[0]
    assert by_cost[1] < by_tokens[1]


def test_global_denominators_make_the_mean_over_ranks_exact() -> None:
    plan = planner(4, 3).plan(1)
    loss_sums = np.random.default_rng(2).random((4, 3))
    by_rank = (loss_sums / plan.mlm_denominators).sum(axis=1).mean()
    masked = MASKED[plan.sample_ids].sum()
    assert by_rank == pytest.approx(loss_sums.sum() / masked)
    assert (loss_sums / plan.nsp_denominators).sum(axis=1).mean() == pytest.approx(
        loss_sums.sum() / 48
    )


def test_per_rank_denominators_are_the_forwards_own() -> None:
    plan = planner(4, 3, "per_rank").plan(1)
    own = MASKED[plan.drawn_ids].sum(axis=2, dtype=float)
    assert np.array_equal(plan.mlm_denominators, own * 3)
    assert np.array_equal(plan.nsp_denominators, np.full((4, 3), 4.0 * 3))


def test_imbalance_is_largest_over_mean() -> None:
    plan = planner(4, 1).plan(2)
    tokens = LENGTHS[plan.drawn_ids].astype(float)
    per_rank = tokens.sum(axis=(1, 2))
    assert plan.imbalance_tokens == pytest.approx(per_rank.max() / per_rank.mean())
    cost = (tokens + tokens**2 / 6144).sum(axis=(1, 2))
    assert plan.imbalance_cost == pytest.approx(cost.max() / cost.mean())
    assert planner(1, 1).plan(2).imbalance_tokens == 1.0


@pytest.mark.parametrize(
    "setting",
    [
        *("run.seed=5", "data.sampler=strata", "data.quantiles=4", "data.balance=none"),
        *("data.deal=one_direction", "data.counts_per_rank=unequal", "data.balance_model=cost"),
        *("data.cost_a=0.5", "data.cost_b=0.5", "data.exchange_window_steps=9"),
        *("parallel.nodes=4", "parallel.ranks_per_node=4"),
        *("parallel.local_batch_size=8", "parallel.grad_accum_steps=3"),
    ],
)
def test_a_stage_is_of_one_plan(tiny_config: Path, setting: str) -> None:
    name, _, _ = setting.partition("=")
    same = (
        *("data.balance=presort_global", "data.cost_b=0.25", "parallel.local_batch_size=4"),
        *("parallel.ranks_per_node=2", "parallel.nodes=2"),
    )
    of_stage = plan_settings(load_config(tiny_config, same))
    of_run = plan_settings(load_config(tiny_config, (*same, setting)))
    assert {key for key in of_stage if of_stage[key] != of_run[key]} == {name}
