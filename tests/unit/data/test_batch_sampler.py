"""The batch sampler: ranks share each global batch, epochs join without a gap, any step at once."""

import re
from collections import Counter
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.data.balance import CostModel
from mlperf_bert.data.batch_sampler import BalancedBatchSampler
from support import REPOSITORY

LENGTHS = np.random.default_rng(4).integers(1, 400, 203)
POLICIES = ("none", "exchange_global", "exchange_local", "presort_local", "presort_global")


def ranks(world_size: int, **options: Any) -> list[BalancedBatchSampler]:
    return [
        BalancedBatchSampler(LENGTHS, world_size=world_size, rank=rank, **options)
        for rank in range(world_size)
    ]


def test_documented_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (REPOSITORY / "docs" / "how" / "data.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(example, {})
    imbalance = [float(number) for number in re.findall(r"\d\.\d+", capsys.readouterr().out)]
    assert len(imbalance) == 1000 // (4 * 8)
    assert 1 <= np.mean(imbalance) < 1.02


@pytest.mark.parametrize("balance", POLICIES)
@pytest.mark.parametrize("sampler", ["uniform", "quantile", "strata", "strata_4_2_2_4"])
def test_ranks_share_the_global_batch(sampler: str, balance: str) -> None:
    options = {"sampler": sampler, "balance": balance, "ranks_per_node": 2}
    (alone,) = ranks(1, batch_size=36, sampler=sampler)
    together = ranks(4, batch_size=9, **options)
    for step in (1, 6, 50):  # of the first epoch, across its end, of a later one
        batches = [one.batch(step) for one in together]
        assert [len(batch) for batch in batches] == [9] * 4
        assert Counter(chain.from_iterable(batches)) == Counter(alone.batch(step))
        assert all(type(index) is int for batch in batches for index in batch)


@settings(max_examples=30, deadline=None)
@given(
    num_samples=st.integers(1, 70),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 5),
    sampler=st.sampled_from(["uniform", "quantile"]),
    counts=st.sampled_from(["equal", "unequal"]),
)
def test_each_sample_once_an_epoch(
    num_samples: int, batch_size: int, world_size: int, sampler: Any, counts: Any
) -> None:
    if batch_size * world_size > num_samples:
        with pytest.raises(ConfigError, match="batch_size"):
            BalancedBatchSampler([1] * num_samples, batch_size=batch_size, world_size=world_size)
        return
    samplers = [
        BalancedBatchSampler(
            LENGTHS[:num_samples].tolist(),
            batch_size=batch_size,
            world_size=world_size,
            rank=rank,
            sampler=sampler,
            counts=counts,
        )
        for rank in range(world_size)
    ]
    times_drawn = np.zeros(num_samples, dtype=int)
    for epoch in range(1, 4):
        lengths = [len(one) for one in samplers]
        batches = [list(one) for one in samplers]
        assert [len(own) for own in batches] == lengths
        for index in chain.from_iterable(chain.from_iterable(batches)):
            times_drawn[index] += 1
        # What is left of an epoch opens the next: less than a global batch is missing.
        assert 0 <= epoch * num_samples - times_drawn.sum() < batch_size * world_size
        whole_epochs = times_drawn.sum() // num_samples
        assert set(times_drawn.tolist()) <= {whole_epochs, whole_epochs + 1}


def test_iteration_continues_and_any_step_is_direct() -> None:
    one = ranks(3, batch_size=5)[1]
    first, second = list(one), list(one)
    assert first != second
    again = ranks(3, batch_size=5)[1]
    assert [again.batch(step) for step in range(len(first) + len(second), 0, -1)] == [
        *reversed(second),
        *reversed(first),
    ]
    again.set_epoch(1)
    assert list(again) == second
    again.set_epoch(0)
    assert list(again) == first


def test_state_is_a_step() -> None:
    one, other = ranks(3, batch_size=5)[0], ranks(3, batch_size=5)[0]
    whole = list(one)
    assert list(islice(other, 4)) == whole[:4]
    assert other.state_dict() == {"step": 4}
    resumed = ranks(3, batch_size=5)[0]
    resumed.load_state_dict(other.state_dict())
    assert len(resumed) == len(whole)
    assert list(resumed) == whole[4:]


def test_cost_is_what_gets_even() -> None:
    def imbalance(cost: CostModel) -> float:
        batches = [one.batch(1) for one in ranks(4, batch_size=12, cost=cost)]
        loads = [(LENGTHS[batch] ** 2).sum() for batch in batches]
        return float(max(loads) / np.mean(loads))

    squares = CostModel(linear=0.0, quadratic=1.0)
    assert imbalance(squares) < imbalance(CostModel(linear=1.0, quadratic=0.0))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sampler": "best"}, "sampler: is 'best'; use one of uniform, quantile"),
        ({"balance": "even"}, "balance: is 'even'"),
        ({"counts": "some"}, "counts: is 'some'"),
        ({"counts": "unequal", "balance": "none"}, "counts: 'unequal' with balance 'none'"),
        ({"rank": 4}, "rank: is 4 of 4"),
        ({"rank": -1}, "rank: is -1 of 4"),
        ({"ranks_per_node": 3}, "ranks_per_node: 3 does not divide 4"),
        ({"batch_size": 0}, "batch_size: 4 x 0"),
        ({"batch_size": 51}, "batch_size: 4 x 51 samples a step of 203"),
        ({"quantiles": 7}, "quantiles"),
    ],
)
def test_arguments_that_cannot_be(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BalancedBatchSampler(LENGTHS, **{"batch_size": 8, "world_size": 4, "rank": 0, **changed})


@pytest.mark.parametrize("lengths", [[], [3, 0], [1.5, 2.0], [[1], [2]], ["a"]])
def test_lengths_that_are_none(lengths: Any) -> None:
    with pytest.raises(DataError, match="lengths"):
        BalancedBatchSampler(lengths, batch_size=1)
