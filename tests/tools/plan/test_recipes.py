"""Published sets and samples come back; what lies between and beyond them follows the lines."""

import math

import pytest

from bert_tools.plan.recipes import knots, lamb_recipe
from bert_tools.plan.samples_to_target import RECIPES, samples_points, samples_to_target
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.evaluation.convergence import expected_samples

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


@pytest.mark.parametrize(("low", "high"), [(768, 3072), (4096, 12288), (448, 768)])
def test_midway_in_the_logarithm_lies_the_geometric_mean(low: int, high: int) -> None:
    middle, *ends = (lamb_recipe(batch) for batch in (round(math.sqrt(low * high)), low, high))
    for name in ("learning_rate", "weight_decay", "decay_steps"):
        both = math.prod(getattr(each, name) for each in ends)
        assert getattr(middle, name) == pytest.approx(math.sqrt(both), rel=1e-2)
    for name in ("beta_1", "beta_2"):  # the middle is rounded
        both = math.prod(1 - getattr(each, name) for each in ends)
        assert 1 - getattr(middle, name) == pytest.approx(math.sqrt(both), rel=1e-2)


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


@pytest.mark.parametrize(
    ("batch", "recipe", "million"),
    [
        (448, "closed_lamb", 2.460),  # NVIDIA v2.1, as its logs say
        (3072, "closed_lamb", 2.732),
        (4096, "closed_lamb", 2.787),
        (16384, "closed_lamb", 5.469),
        (16384, "open_adam", 2.932736),  # Samsung v2.0: 179 steps of 16,384
        (16416, "open_adam", 2.938464),  # 179 steps of 16,416
        (448, "open_adamw", 0.6355),  # between MosaicML's 0.628 and 0.643
    ],
)
def test_published_points(batch: int, recipe: str, million: float) -> None:
    found = samples_to_target(batch, recipe)
    assert found.samples == pytest.approx(million * 1e6)
    assert found.in_range
    assert found.low <= found.samples <= found.high


def test_samples_midway_are_the_geometric_mean() -> None:
    middle = samples_to_target(1536, "closed_lamb")  # 1,536 = sqrt(768 * 3,072)
    assert middle.samples == pytest.approx(math.sqrt(2.520e6 * 2.732e6))
    assert middle.in_range


def test_the_reference_points_are_those_of_the_checker() -> None:
    for batch in (448, 1000, 4608, 10_000, 16_384):
        expected = expected_samples(batch)
        assert expected is not None
        found = samples_to_target(batch, "closed_reference")
        assert (found.samples, found.low) == (expected.mean, expected.minimum)


@pytest.mark.parametrize(("batch", "steps"), [(448, 1407), (4096, 283), (8192, 214), (16384, 179)])
def test_the_hypothesis(batch: int, steps: int) -> None:
    """145 * (1 + 3,900 / batch) by hand; 0.63 M samples at 448 and 2.93 M at 16,384."""
    found = samples_to_target(batch, "open_hypothesis")
    assert found.samples / batch == pytest.approx(steps, abs=1)
    assert found.low <= found.samples <= found.high


@pytest.mark.parametrize("recipe", RECIPES)
def test_beyond_the_points_the_bounds_are_constant_samples_and_constant_steps(recipe: str) -> None:
    points = samples_points(recipe)  # type: ignore[arg-type]
    smallest, largest = points[0], points[-1]
    below = samples_to_target(smallest.global_batch_size // 4, recipe)
    above = samples_to_target(largest.global_batch_size * 4, recipe)
    assert not below.in_range and not above.in_range
    assert (below.samples, below.high) == (smallest.samples, smallest.high)
    assert below.low == pytest.approx(smallest.low / 4)
    assert (above.low, above.samples) == (largest.low, pytest.approx(4 * largest.samples))


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_batch_has_an_estimate_that_leads_on_without_a_jump(recipe: str) -> None:
    before = samples_to_target(1, recipe)
    for batch in range(1, 40_000, 97):
        found = samples_to_target(batch, recipe)
        assert 0 < found.low <= found.samples <= found.high < math.inf
        assert before.samples / 1.1 <= found.samples <= before.samples * 1.5
        before = found


@pytest.mark.parametrize("recipe", ["closed_reference", "open_adam", "open_hypothesis"])
def test_a_larger_batch_needs_no_fewer_samples(recipe: str) -> None:
    samples = [samples_to_target(batch, recipe).samples for batch in range(448, 20_000, 64)]
    assert samples == sorted(samples)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 at least"):
        samples_to_target(0, "closed_lamb")
    with pytest.raises(ConfigError, match="use one of closed_lamb, "):
        samples_to_target(448, "sgd")
