"""Published sets come back as they are, and what lies between them follows the documented lines."""

import math
from collections.abc import Callable

import pytest

from bert_tools.plan.recipes import LambRecipe, knots, lamb_recipe
from mlperf_bert.common.errors import ConfigError

KNOTS = list(knots())
LARGEST = 16_384


def test_at_a_knot_the_published_set_comes_back() -> None:
    assert [lamb_recipe(knot.global_batch_size) for knot in KNOTS] == KNOTS
    assert KNOTS[-1].global_batch_size == LARGEST
    batches = [knot.global_batch_size for knot in KNOTS]
    assert batches == sorted(set(batches))


def test_the_set_of_eight_dgx_a100() -> None:
    recipe = lamb_recipe(3072)
    assert (recipe.learning_rate, recipe.weight_decay) == (2.0992e-3, 0.1)
    assert (recipe.beta_1, recipe.beta_2) == (0.60466, 0.85437)
    assert (recipe.warmup_steps, recipe.decay_steps, recipe.form) == (0, 1059, "continuous")


@pytest.mark.parametrize(
    "value",
    [
        lambda recipe: recipe.learning_rate,
        lambda recipe: recipe.weight_decay,
        lambda recipe: recipe.decay_steps,
        lambda recipe: 1 - recipe.beta_1,
        lambda recipe: 1 - recipe.beta_2,
    ],
    ids=["rate", "weight decay", "steps", "1 - beta 1", "1 - beta 2"],
)
@pytest.mark.parametrize(("low", "high"), [(768, 3072), (4096, 12288), (448, 768)])
def test_midway_in_the_logarithm_lies_the_geometric_mean(
    value: Callable[[LambRecipe], float], low: int, high: int
) -> None:
    middle = round(math.sqrt(low * high))
    both = math.sqrt(value(lamb_recipe(low)) * value(lamb_recipe(high)))
    assert value(lamb_recipe(middle)) == pytest.approx(both, rel=1e-2)  # the middle is rounded


def test_warm_up_keeps_its_share_of_the_schedule() -> None:
    low, middle, high = (lamb_recipe(batch) for batch in (4096, 7094, 12288))
    for name in ("warmup_steps", "start_warmup_step"):
        share = [getattr(each, name) / each.decay_steps for each in (low, middle, high)]
        assert share[1] == pytest.approx((share[0] + share[2]) / 2, abs=2 / middle.decay_steps)
    assert middle.form == "published"


def test_below_the_smallest_set_samples_stay_and_the_rate_goes_with_the_root() -> None:
    whole, quarter = lamb_recipe(256), lamb_recipe(64)
    assert quarter.learning_rate == pytest.approx(whole.learning_rate / 2)
    assert quarter.decay_steps == 4 * whole.decay_steps
    assert (quarter.beta_1, quarter.beta_2) == (whole.beta_1, whole.beta_2)


def test_any_batch_has_a_set_that_a_schedule_can_hold() -> None:
    for batch in range(1, LARGEST + 1, 7):
        recipe = lamb_recipe(batch)
        assert 0 < recipe.beta_1 < 1
        assert 0 < recipe.beta_2 < 1
        assert recipe.learning_rate > 0
        assert recipe.start_warmup_step <= 0 <= recipe.warmup_steps < recipe.decay_steps


@pytest.mark.parametrize("batch", [0, LARGEST + 1])
def test_outside_the_published_sets_there_is_none(batch: int) -> None:
    with pytest.raises(ConfigError, match="use 1 to 16,384"):
        lamb_recipe(batch)
