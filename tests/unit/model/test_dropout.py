"""Dropout on a CPU: rate, scale, gradient, repeatability, and independent elements."""

import pytest
import torch

from mlperf_bert.model.dropout import DropoutKeys, DropoutSite, dropout

SHAPE = (501, 333)  # no multiple of the four elements that share a draw
NUM_ELEMENTS = SHAPE[0] * SHAPE[1]


def site_of(probability: float) -> DropoutSite:
    rows, columns = torch.arange(SHAPE[0]), torch.zeros(SHAPE[0], dtype=torch.int64)
    return DropoutSite(
        probability, 1, DropoutKeys(7, torch.ones(1, dtype=torch.int64), rows, columns)
    )


def kept_of_ones(probability: float, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(seed)
    return dropout(torch.ones(SHAPE, dtype=dtype), site_of(probability))


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.9])
def test_rate_and_mean(probability: float) -> None:
    output = kept_of_ones(probability, seed=1)
    expected = NUM_ELEMENTS * probability
    standard_error = (expected * (1 - probability)) ** 0.5
    assert abs(int((output == 0).sum()) - expected) < 5 * standard_error
    scale = output[output != 0].unique()
    assert scale.numel() == 1
    assert float(scale) == pytest.approx(1 / (1 - probability), rel=2**-16 / (1 - probability))


def test_elements_are_independent_of_their_neighbours() -> None:
    flat = (kept_of_ones(0.5, seed=2) != 0).flatten().double() * 2 - 1
    for distance in (1, 2, 3, 4, SHAPE[1]):
        products = flat[distance:] * flat[:-distance]
        assert abs(float(products.mean())) < 5 / len(products) ** 0.5


def test_the_gradient_goes_where_the_value_went() -> None:
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    output = dropout(x, site_of(0.3))
    (gradient,) = torch.autograd.grad(output, x, torch.ones_like(output))
    torch.testing.assert_close(gradient * x, output, rtol=1e-12, atol=0)
    assert 0 < int((gradient == 0).sum()) < NUM_ELEMENTS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_same_seed_same_elements_in_every_dtype(dtype: torch.dtype) -> None:
    first, second = kept_of_ones(0.1, 3, dtype), kept_of_ones(0.1, 3, dtype)
    assert first.dtype == dtype
    assert torch.equal(first, second)
    assert torch.equal(first == 0, kept_of_ones(0.1, 3) == 0)
    assert not torch.equal(first, kept_of_ones(0.1, 4, dtype))


def test_none_draws_nothing() -> None:
    x = torch.randn(5)
    before = torch.get_rng_state()
    assert dropout(x, None) is x
    assert torch.equal(torch.get_rng_state(), before)
