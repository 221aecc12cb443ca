"""Clip policies on one rank against their definition, and the documented use of the hook."""

import gc
import re
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config.sections import ClipSection, OptimSection
from mlperf_bert.distributed.clip_hook import ClipOutcome
from mlperf_bert.distributed.clip_policies import (
    gradient_norm,
    limit_before_allreduce,
    limit_factor,
)
from mlperf_bert.distributed.clipping import make_clipping
from mlperf_bert.distributed.wire import plain_wire
from mlperf_bert.optim.registry import make_optimizer_alone
from support import REPOSITORY

BEFORE = ("whole_before_allreduce", "bucket_before_allreduce")


class Model(nn.Module):
    """Its gradients are what they are set to."""

    def __init__(self, scale: float, spoilt_by: float | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        shapes = [(7, 3), (5,), ()]
        self.wanted = [scale * torch.randn(shape, generator=generator) for shape in shapes]
        if spoilt_by is not None:
            self.wanted[1][2] = spoilt_by
        self.weights = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def backward(self) -> None:
        pairs = zip(self.weights, self.wanted, strict=True)
        torch.stack([(weight * wanted).sum() for weight, wanted in pairs]).sum().backward()

    @property
    def gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights if weight.grad is not None]


def clip(section: ClipSection, model: Model, forwards: int = 1) -> ClipOutcome:
    """Clip, and do what is left to the update."""
    wire = plain_wire(torch.device("cpu"))
    clipping = make_clipping(section, model, wire, forwards=forwards, bucket_cap_mb=1e-5)
    for forward in range(forwards):
        with clipping.forward(is_last=forward == forwards - 1):
            model.backward()
    outcome = clipping.finish()
    for gradient in model.gradients:
        gradient.mul_(outcome.gradient_factor)
    return outcome


def global_norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())


@pytest.mark.parametrize("policy", ["after_allreduce", "whole_before_allreduce"])
@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_global_norm_is_limited(scale: float, policy: str) -> None:
    model = Model(scale)
    outcome = clip(ClipSection(policy=policy, max_norm=2.0), model)  # type: ignore[arg-type]
    expected = global_norm(model.wanted)
    assert float(outcome.grad_norm) == pytest.approx(expected, rel=1e-6)
    assert float(outcome.clipped_fraction) == float(expected > 2.0)
    factor = min(1.0, 2.0 / expected)
    for wanted, found in zip(model.wanted, model.gradients, strict=True):
        torch.testing.assert_close(found, factor * wanted)
        assert factor != 1.0 or torch.equal(found, wanted)


def test_none_measures_and_leaves_alone() -> None:
    model = Model(100.0)
    outcome = clip(ClipSection(policy="none"), model)
    assert float(outcome.grad_norm) == pytest.approx(global_norm(model.wanted), rel=1e-6)
    assert float(outcome.clipped_fraction) == 0
    pairs = zip(model.wanted, model.gradients, strict=True)
    assert all(torch.equal(wanted, found) for wanted, found in pairs)


@pytest.mark.parametrize("forwards", [1, 3])
def test_one_rank_has_buckets_too(forwards: int) -> None:
    model = Model(100.0)
    section = ClipSection(policy="bucket_before_allreduce", accumulation="each_forward")
    outcome = clip(section, model, forwards)
    # A cap of ten bytes: the last tensor (of 4) waits for the one before it.
    buckets = [model.gradients[1:], model.gradients[:1]]
    numels = [sum(part.numel() for part in bucket) for bucket in buckets]
    for bucket, numel in zip(buckets, numels, strict=True):
        assert global_norm(bucket) == pytest.approx((numel / sum(numels)) ** 0.5, rel=1e-6)
    assert float(outcome.clipped_fraction) == 1
    expected = forwards * global_norm(model.wanted)
    assert float(outcome.grad_norm) == pytest.approx(expected, rel=1e-6)


def test_limits_of_any_plan_add_up_to_the_norm() -> None:
    section = ClipSection(policy="bucket_before_allreduce", max_norm=3.0)
    for plan in ([10], [1, 9], [2, 3, 5]):
        limits = [limit_before_allreduce(section, numel, 10) for numel in plan]
        assert sum(limit**2 for limit in limits) == pytest.approx(9.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_without_a_finite_norm_all_is_multiplied_by_nan(bad: float) -> None:
    norm = gradient_norm([torch.ones(3), torch.tensor([1.0, bad])])
    assert not torch.isfinite(norm)
    assert bool(limit_factor(norm, 1.0).isnan())


def test_sixteen_bit_norms_are_taken_in_fp32() -> None:
    gradients = [torch.full((4,), 6e4, dtype=torch.float16)]  # its norm is beyond fp16
    assert float(gradient_norm(gradients)) == pytest.approx(2 * 6e4, rel=1e-3)


def test_the_norm_of_many_elements_keeps_its_digits() -> None:
    gradient = torch.randn(2**22 + 7, generator=torch.Generator().manual_seed(1))
    expected = float(gradient.double().norm())
    assert float(gradient_norm([gradient])) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("policy", ["none", "after_allreduce", *BEFORE])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_a_gradient_that_is_not_finite_leaves_all_as_it_was(
    policy: str, bad: float, name: Literal["adamw", "lamb"]
) -> None:
    model = Model(1.0, spoilt_by=bad)
    optimizer = make_optimizer_alone(OptimSection(name=name, learning_rate=0.1), model)
    outcome = clip(ClipSection(policy=policy), model)  # type: ignore[arg-type]
    assert float(outcome.skip) == 1
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer.step(rate, outcome.gradient_factor, outcome.skip)
    assert all(bool((weight == 1).all()) for weight in model.weights)
    assert float(optimizer.scalar_state()["updates"]) == 0
    assert not any(bool(moment.any()) for moment in optimizer.flat_state().values())


def test_documented_example_runs_and_leaves_nothing_in_the_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    leave = dist.destroy_process_group
    left: list[list[object]] = []

    def leaving() -> None:
        left.append([held for held in gc.get_objects() if type(held) is DistributedDataParallel])
        leave()

    monkeypatch.setattr(dist, "destroy_process_group", leaving)
    text = (REPOSITORY / "docs" / "clip_hook.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(example, {})
    assert left == [[]]  # a group that a model still holds may hang when it goes
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", capsys.readouterr().out)]
    norm, clipped, skipped = numbers
    assert norm > 1 and 0 < clipped <= 1 and skipped == 0
