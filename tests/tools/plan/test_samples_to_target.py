"""Published points come back, lines between them are straight in logarithms, bounds are bounds."""

import math

import pytest

from bert_tools.plan.samples_to_target import RECIPES, samples_points, samples_to_target
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.evaluation.convergence import expected_samples


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


def test_midway_in_the_logarithm_lies_the_geometric_mean() -> None:
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
