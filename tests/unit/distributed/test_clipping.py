"""Clip policies against their definition."""

import pytest
import torch

from mlperf_bert.config import ClipSection
from mlperf_bert.distributed.clipping import make_clip_policy


def gradients(scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = [(7, 3), (5,), ()]
    return [scale * torch.randn(shape, generator=generator) for shape in shapes]


def global_norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_after_allreduce_limits_the_global_norm(scale: float) -> None:
    before, clipped = gradients(scale), gradients(scale)
    norm = make_clip_policy(ClipSection(policy="after_allreduce", max_norm=2.0))(clipped)
    expected = global_norm(before)
    assert float(norm) == pytest.approx(expected, rel=1e-6)
    factor = min(1.0, 2.0 / expected)
    for old, new in zip(before, clipped, strict=True):
        torch.testing.assert_close(new, factor * old)
    if factor == 1.0:
        assert all(torch.equal(old, new) for old, new in zip(before, clipped, strict=True))


def test_none_measures_and_leaves_alone() -> None:
    before, after = gradients(100.0), gradients(100.0)
    norm = make_clip_policy(ClipSection(policy="none"))(after)
    assert float(norm) == pytest.approx(global_norm(before), rel=1e-6)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
