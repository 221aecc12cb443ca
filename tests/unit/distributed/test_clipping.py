"""Clip policies on one rank, the documented use of the hook, and what is sent in 16 bits."""

import gc
import re
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config.sections import ClipSection, OptimSection
from mlperf_bert.distributed.clipping import (
    gradient_norm,
    make_clipping,
    multiply,
    wire_dtype,
)
from mlperf_bert.optim.optimizers import make_optimizer_alone
from support import REPOSITORY

POLICIES = ("none", "after_allreduce", "whole_before_allreduce", "bucket_before_allreduce")


class Model(nn.Module):
    """Its gradients are what they are set to."""

    def __init__(self, scale, spoilt_by=None):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        shapes = [(7, 3), (5,), ()]
        self.wanted = [scale * torch.randn(shape, generator=generator) for shape in shapes]
        if spoilt_by is not None:
            self.wanted[1][2] = spoilt_by
        self.weights = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def backward(self):
        pairs = zip(self.weights, self.wanted, strict=True)
        torch.stack([(weight * wanted).sum() for weight, wanted in pairs]).sum().backward()

    @property
    def gradients(self):
        return [weight.grad for weight in self.weights if weight.grad is not None]


def clip(section, model, micro_batches=1):
    """Clip, and do what is left to the update."""
    clipping = make_clipping(section, model, bucket_cap_mb=1e-5)
    for forward in range(micro_batches):
        with clipping.forward(is_last=forward == micro_batches - 1):
            model.backward()
    outcome = clipping.finish()
    for gradient in model.gradients:
        gradient.mul_(outcome.gradient_factor)
    return outcome


def global_norm(tensors):
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())


@pytest.mark.parametrize("policy", POLICIES[:3])
@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_global_norm_is_limited(scale, policy):
    model = Model(scale)
    outcome = clip(ClipSection(policy=policy, max_norm=2.0), model)
    expected = global_norm(model.wanted)
    assert float(outcome.grad_norm) == pytest.approx(expected, rel=1e-6)
    factor = 1.0 if policy == "none" else min(1.0, 2.0 / expected)
    assert float(outcome.clipped_fraction) == float(factor < 1)
    for wanted, found in zip(model.wanted, model.gradients, strict=True):
        torch.testing.assert_close(found, factor * wanted)
        assert factor != 1.0 or torch.equal(found, wanted)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_one_rank_has_buckets_too(micro_batches):
    model = Model(100.0)
    outcome = clip(
        ClipSection(policy="bucket_before_allreduce", max_norm=3.0), model, micro_batches
    )
    # A cap of ten bytes: the last tensor (of 4) waits for the one before it.
    buckets = [model.gradients[1:], model.gradients[:1]]
    numels = [sum(part.numel() for part in bucket) for bucket in buckets]
    for bucket, numel in zip(buckets, numels, strict=True):
        assert global_norm(bucket) == pytest.approx(3 * (numel / sum(numels)) ** 0.5, rel=1e-6)
    assert float(outcome.clipped_fraction) == 1
    expected = micro_batches * global_norm(model.wanted)
    assert float(outcome.grad_norm) == pytest.approx(expected, rel=1e-6)


def test_norms_keep_their_digits():
    of_16_bits = torch.ones(1000, dtype=torch.bfloat16)  # bf16 has 31.625 in place of the norm
    many = torch.randn(2**22 + 7, generator=torch.Generator().manual_seed(1))
    for gradient in (of_16_bits, many):
        expected = float(gradient.double().norm())
        assert float(gradient_norm([gradient])) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_a_gradient_that_is_not_finite_leaves_all_as_it_was(policy, bad, name):
    model = Model(1.0, spoilt_by=bad)
    optimizer = make_optimizer_alone(OptimSection(name=name, learning_rate=0.1), model)
    outcome = clip(ClipSection(policy=policy), model)
    assert float(outcome.skip) == 1
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer.step(rate, outcome.gradient_factor, outcome.skip)
    assert all(bool((weight == 1).all()) for weight in model.weights)
    assert float(optimizer.scalar_state()["updates"]) == 0
    assert not any(bool(moment.any()) for moment in optimizer.flat_state().values())


def test_documented_example_runs_and_leaves_nothing_in_the_group(capsys, monkeypatch):
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    leave = dist.destroy_process_group
    left = []

    def leaving():
        left.append([held for held in gc.get_objects() if type(held) is DistributedDataParallel])
        leave()

    monkeypatch.setattr(dist, "destroy_process_group", leaving)
    text = (REPOSITORY / "docs" / "concepts" / "clipping.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(example, {})
    assert left == [[]]  # a group that a model still holds may hang when it goes
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", capsys.readouterr().out)]
    norm, clipped, skipped = numbers
    assert norm > 1 and 0 < clipped <= 1 and skipped == 0


def test_gradients_are_converted_if_bf16_is_wanted_and_they_are_not():
    for gradients in (torch.float64, torch.float32, torch.bfloat16):
        assert wire_dtype(gradients, "as_gradients") is None
    assert wire_dtype(torch.float32, "bf16") == torch.bfloat16
    assert wire_dtype(torch.bfloat16, "bf16") is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [3e-8, 1 / 3, float("nan")])
def test_multiply_rounds_once_also_in_place(dtype, factor):
    gradient = torch.cat([torch.tensor([0.0, -2.0, 1024.0]), torch.linspace(0.9, 1.1, 998)])
    gradient = gradient.to(dtype).view(7, 143)
    of_factor = torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32))
    exact = gradient.to(of_factor.dtype) * of_factor
    for out in (torch.empty_like(gradient, dtype=torch.float32), gradient):
        multiply(gradient, of_factor, out)
        torch.testing.assert_close(out, exact.to(out.dtype), rtol=0, atol=0, equal_nan=True)
    # NaN in each element but none, and 3e-8 too small for none.
    assert int((gradient == 0).sum()) == (factor == factor)


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES)
def test_ddp_gets_a_hook_only_if_something_is_to_be_done_before_it_sends(policy, wire):
    ddp = Mock(spec=DistributedDataParallel, process_group=Mock(size=lambda: 2))
    ddp.parameters.return_value = [nn.Parameter(torch.ones(3))]
    make_clipping(ClipSection(policy=policy), ddp, wire)
    assert ddp.register_comm_hook.called == (wire is not None or "before" in policy)
