"""What an exchange must deliver, without communication: deals by received lengths, and routes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_token_packets import SMALL, make_samples

from mlperf_bert.config.sections import BalancePolicy, Deal
from mlperf_bert.data.balance import Balance, StepPlan, StepPlanner
from mlperf_bert.data.exchange import dealt
from mlperf_bert.data.mpi_readers import wanted_places
from mlperf_bert.data.sampler import UniformSampler
from mlperf_bert.data.token_packets import join, to_packet

DEALS: tuple[Deal, ...] = ("snake", "one_direction")


def plan_of(num_samples: int, policy: BalancePolicy, step: int) -> StepPlan:
    rng = np.random.default_rng(num_samples)
    planner = StepPlanner(
        UniformSampler(num_samples, 48, seed=3),
        rng.integers(1, 100, num_samples).astype(np.uint16),
        np.ones(num_samples, dtype=np.uint8),
        world_size=4,
        grad_accum_steps=2,
        balance=Balance(policy=policy, ranks_per_node=2),
    )
    return planner.plan(step)


@pytest.mark.parametrize("direction", DEALS)
@given(lengths=st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1))
def test_hands_are_those_of_the_single_process_definition(
    direction: Deal, lengths: list[list[int]]
) -> None:
    drawn = [to_packet(make_samples(each), SMALL) for each in lengths]
    cost = np.array(lengths, dtype=np.float64)[:, np.newaxis]
    expected = Balance(policy="exchange_global", deal=direction)(cost).places.reshape(-1, 3)
    for hand, places in enumerate(expected):
        mine = dealt(drawn, hand, direction)
        assert mine.input_ids.tolist() == join(drawn).take(places).input_ids.tolist()


@pytest.mark.parametrize("direction", DEALS)
@given(lengths=st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=5))
def test_ragged_draws_lose_nothing(direction: Deal, lengths: list[list[int]]) -> None:
    drawn = [to_packet(make_samples(each), SMALL) for each in lengths]
    hands = [dealt(drawn, hand, direction) for hand in range(len(drawn))]
    sizes = [len(hand.lengths) for hand in hands]
    assert max(sizes) - min(sizes) <= 1
    for hand in hands:
        assert sorted(hand.lengths.tolist(), reverse=True) == hand.lengths.tolist()
    texts = [
        sorted(
            part.to_bytes().tobytes()
            for part in packet.split(np.ones(len(packet.lengths), dtype=np.int64))
        )
        for packet in (join(drawn), join(hands))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("policy", "ranks"), [("exchange_local", range(2, 4)), ("exchange_global", range(4))]
)
@pytest.mark.parametrize("num_samples", [1000, 61])  # of 61, some steps draw a sample twice
def test_routes_lead_to_the_plan(policy: BalancePolicy, ranks: range, num_samples: int) -> None:
    plans = [plan_of(num_samples, policy, step) for step in (1, 2, 3)]
    drawn = np.stack([plan.drawn_ids[ranks.start : ranks.stop] for plan in plans], axis=1)
    wanted = wanted_places(plans, ranks)
    assert sorted(np.concatenate(wanted).tolist()) == list(range(drawn.size))
    for rank, places in zip(ranks, wanted, strict=True):
        planned = [plan.ids_of(rank, forward) for plan in plans for forward in range(2)]
        assert drawn.ravel()[places].tolist() == np.concatenate(planned).tolist()


def test_a_group_that_is_not_the_plans_is_refused() -> None:
    plan = plan_of(1000, "exchange_global", 1)
    with pytest.raises(AssertionError, match="beyond this group"):
        wanted_places([plan], range(2))
