"""Dropout on a GPU: equal to the definition, and part of a CUDA graph that follows the step."""

from dataclasses import replace

import pytest
import torch

from dropout_cases import CHECKS, check_dropout, site_of
from graph_cases import captured
from mlperf_bert.model import dropout as model_dropout

DEVICE = "cuda"
ROWS, CHANNELS = 300, 256


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("check", CHECKS)
def test_kernels(check):
    check(model_dropout, DEVICE)


@pytest.mark.usefixtures("triton")
def test_dropout_follows_the_bits():
    check_dropout(model_dropout.dropout, DEVICE)


@pytest.mark.usefixtures("triton")
def test_captured_dropout_follows_the_step():
    site = site_of(ROWS, device=DEVICE)
    cu_seqlens = torch.tensor([0, 100, ROWS], dtype=torch.int32, device=DEVICE)
    x = torch.randn(ROWS, CHANNELS, device=DEVICE, requires_grad=True)

    def compute(where):
        output = model_dropout.dropout(x, where)
        (gradient,) = torch.autograd.grad(output.sum(), x)
        bits = model_dropout.attention_keep_bits(where, 4, cu_seqlens, 200)
        return output, gradient, bits[100:]  # rows whose bytes are all written

    graph, found = captured(lambda: compute(site))
    for step in (1, 2, 1):
        site.keys.step.fill_(step)
        graph.replay()
        step_of_its_own = torch.tensor([step], device=DEVICE)
        eager = compute(replace(site, keys=replace(site.keys, step=step_of_its_own)))
        for one, other in zip(found, eager, strict=True):
            assert torch.equal(one, other)
