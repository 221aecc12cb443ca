"""Scales of what is sent, the room that they leave, and multiplication in 16 bits."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from mlperf_bert.config.sections import ClipSection
from mlperf_bert.distributed.clipping import make_clipping
from mlperf_bert.distributed.wire import (
    LARGEST_SUM_EXPONENT,
    UNSCALED_LOSS_EXPONENT,
    make_wire,
    multiply,
    plain_wire,
)

BEFORE = ("whole_before_allreduce", "bucket_before_allreduce")
AFTER = ("none", "after_allreduce")
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def loss_scale(value: float = 1.0) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


@pytest.mark.parametrize("policy", [*AFTER, *BEFORE])
@pytest.mark.parametrize(
    ("gradients", "wire"),
    [
        *((torch.float32, name) for name in ("as_gradients", "fp32", "bf16")),
        *((torch.bfloat16, name) for name in ("as_gradients", "fp32", "bf16")),
        (torch.float64, "as_gradients"),
    ],
)
def test_dtypes_with_the_range_of_fp32_are_not_scaled(
    policy: Any, gradients: torch.dtype, wire: Any
) -> None:
    found = make_wire(ClipSection(policy=policy), gradients, wire, loss_scale())
    assert found.scale == 1
    names = {"bf16": torch.bfloat16, "fp32": torch.float32}
    expected = names.get(wire)
    assert found.dtype == (None if expected == gradients else expected)


@pytest.mark.parametrize("policy", BEFORE)
@pytest.mark.parametrize("max_norm", [0.01, 0.5, 1.0, 1.5, 2.0, 7.3, 1e3])
@pytest.mark.parametrize(
    ("gradients", "wire"), [(torch.float32, "fp16"), (torch.float16, "as_gradients")]
)
def test_a_clipped_sum_has_the_largest_scale_that_cannot_overflow(
    policy: Any, max_norm: float, gradients: torch.dtype, wire: Any
) -> None:
    found = make_wire(ClipSection(policy=policy, max_norm=max_norm), gradients, wire, loss_scale())
    scale = float(found.scale)
    assert math.log2(scale).is_integer()
    largest = 2.0**LARGEST_SUM_EXPONENT
    assert max_norm * scale <= largest < 2 * max_norm * scale
    assert largest <= torch.finfo(torch.float16).max


@pytest.mark.parametrize("policy", AFTER)
def test_other_sums_go_by_the_loss_scale(policy: Any) -> None:
    clip, scale = ClipSection(policy=policy), loss_scale(512.0)
    for wire in ("as_gradients", "fp16", "fp32", "bf16"):
        found = make_wire(clip, torch.float16, wire, scale)  # type: ignore[arg-type]
        scale.fill_(256.0)  # it changes while training
        assert found.scale == found.loss_scale == 256
        scale.fill_(512.0)
    for gradients in (torch.float32, torch.bfloat16):
        found = make_wire(clip, gradients, "fp16", loss_scale())
        assert found.scale == 2**UNSCALED_LOSS_EXPONENT


def test_a_plain_wire_changes_nothing() -> None:
    wire = plain_wire(torch.device("cpu"))
    assert wire.dtype is None and wire.scale == 1 and wire.loss_scale == 1


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("out_dtype", [*SIXTEEN_BITS, torch.float32])
def test_multiply_rounds_once(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    gradient = torch.linspace(0.9, 1.1, 1001).to(dtype).view(7, 143)
    factor = torch.tensor(1 / 3, dtype=torch.float32)
    exact = gradient.double() * factor.double()
    found = torch.empty_like(gradient, dtype=out_dtype)
    multiply(gradient, factor, found)
    assert torch.equal(found, exact.float().to(out_dtype))
    # Rounded to the gradients' dtype first, the factor alone would be off by more.
    twice = (gradient.double() * factor.to(dtype).double()).to(out_dtype)
    assert not torch.equal(found, twice)
    if dtype == out_dtype:
        multiply(gradient, factor, gradient)
        assert torch.equal(gradient, found)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_multiply_keeps_a_small_factor(dtype: torch.dtype) -> None:
    gradient = torch.full((4,), 1024.0, dtype=dtype)
    factor = torch.tensor(3e-8, dtype=torch.float32)  # fp16 has no number near
    multiply(gradient, factor, gradient)
    assert torch.equal(gradient, torch.full((4,), 1024 * 3e-8).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_multiply_without_rounding_is_exact(dtype: torch.dtype) -> None:
    gradient = torch.randn(9, generator=torch.Generator().manual_seed(1)).to(dtype)
    factor = torch.tensor(0.3, dtype=dtype)
    expected = gradient * factor
    multiply(gradient, factor, gradient)
    assert torch.equal(gradient, expected)


def test_nan_reaches_every_element() -> None:
    gradient = torch.tensor([0.0, 1.0, -2.0], dtype=torch.bfloat16)
    multiply(gradient, torch.tensor(torch.nan), gradient)
    assert bool(gradient.isnan().all())


@pytest.mark.parametrize("policy", [*AFTER, *BEFORE])
@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16"])
def test_one_rank_clips_the_same_whatever_it_would_send_in(policy: Any, wire_dtype: Any) -> None:
    found = []
    for name in ("as_gradients", wire_dtype):
        model = nn.Linear(3, 2)
        clip = ClipSection(policy=policy, max_norm=0.5)
        wire = make_wire(clip, torch.float32, name, loss_scale())
        clipping = make_clipping(clip, model, wire)
        with clipping.forward(is_last=True):
            (7 * model.weight.sum() + 3 * model.bias.sum()).backward()
        outcome = clipping.finish()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        found.append(torch.cat([each.flatten() for each in gradients]) * outcome.gradient_factor)
    assert torch.equal(*found)  # scales are powers of two
    unclipped = (6 * 7**2 + 2 * 3**2) ** 0.5
    assert float(found[0].norm()) == pytest.approx(unclipped if policy == "none" else 0.5)
