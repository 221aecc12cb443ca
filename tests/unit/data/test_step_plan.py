"""Step plans: nothing lost between ranks, exact denominators, imbalance by definition."""

import numpy as np
import pytest

from mlperf_bert.data.balance import Balance, CostModel
from mlperf_bert.data.sampler import UniformSampler
from mlperf_bert.data.step_plan import StepPlanner

LENGTHS = np.random.default_rng(1).integers(5, 512, 1000).astype(np.uint16)
MASKED = np.maximum(1, LENGTHS // 7).astype(np.uint8)


def planner(world_size: int, accumulation: int, normalization: str = "global") -> StepPlanner:
    return StepPlanner(
        UniformSampler(len(LENGTHS), 48, seed=9),
        LENGTHS,
        MASKED,
        world_size=world_size,
        grad_accum_steps=accumulation,
        loss_normalization=normalization,  # type: ignore[arg-type]
        balance=Balance(),
        balance_model="tokens",
        cost=CostModel(linear=1.0, quadratic=1 / 6144),
    )


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (4, 1), (2, 3), (8, 2)])
def test_ranks_share_the_global_batch(world_size: int, accumulation: int) -> None:
    plan = planner(world_size, accumulation).plan(5)
    assert plan.counts.tolist() == [[48 // world_size // accumulation] * accumulation] * world_size
    expected = UniformSampler(len(LENGTHS), 48, seed=9).global_batch(5)
    assert np.array_equal(np.sort(plan.sample_ids, axis=None), np.sort(expected))
    assert plan.num_tokens.sum() == LENGTHS[expected].sum()


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
