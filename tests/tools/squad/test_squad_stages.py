"""Splits of layers into stages against all splits there are."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from bert_tools.squad.stages import balanced_split, layer_costs
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import ModelSection


def largest(costs: list[float], bounds: list[int]) -> float:
    return max(sum(costs[a:b]) for a, b in pairwise(bounds))


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_no_split_has_a_smaller_largest_stage(parts: int) -> None:
    random = np.random.default_rng(parts)
    for _ in range(5):
        costs = random.uniform(0.1, 3, 7).tolist()
        bounds = balanced_split(costs, parts)
        assert bounds[0] == 0 and bounds[-1] == 7 and len(bounds) == parts + 1
        assert sorted(set(bounds)) == bounds
        every = ([0, *cuts, 7] for cuts in combinations(range(1, 7), parts - 1))
        assert largest(costs, bounds) == pytest.approx(min(largest(costs, each) for each in every))


def test_equal_layers_are_split_evenly() -> None:
    costs = layer_costs(ModelSection(num_layers=12), length=180.0)
    assert balanced_split(costs, 4) == [0, 3, 6, 9, 12]


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match="has 5 stages, the model 4 layers"):
        balanced_split([1.0] * 4, 5)


def test_costs_by_hand() -> None:
    model = ModelSection(hidden_size=8, intermediate_size=32, num_layers=2, num_heads=2)
    # A token's products in a layer: 4 D^2 + 2 D F = 256 + 512, and 2 D L = 160 for 10 tokens;
    # 6 operations each for forward and backward. The scores: 2 D = 16.
    layer, head = 6 * 10 * (768 + 160), 6 * 10 * 16
    assert layer_costs(model, 10.0) == pytest.approx([layer, layer + head])
