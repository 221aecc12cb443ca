"""Dropout on a GPU: equal to the definition, and part of a CUDA graph that follows the step."""

from dataclasses import replace

import pytest
import torch

from dropout_cases import CHECKS, site_of
from mlperf_bert.model import dropout as model_dropout

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: Triton kernels are not run on one here"
)
DEVICE = "cuda"
ROWS, CHANNELS = 300, 256


@pytest.mark.parametrize("check", CHECKS)
def test_kernels(check: object) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    check(model_dropout, DEVICE)


def test_captured_dropout_follows_the_step() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    site = site_of(ROWS, device=DEVICE)
    cu_seqlens = torch.tensor([0, 100, ROWS], dtype=torch.int32, device=DEVICE)
    x = torch.randn(ROWS, CHANNELS, device=DEVICE, requires_grad=True)

    def compute(where: model_dropout.DropoutSite) -> tuple[torch.Tensor, ...]:
        output = model_dropout.dropout(x, where)
        (gradient,) = torch.autograd.grad(output.sum(), x)
        bits = model_dropout.attention_keep_bits(where, 4, cu_seqlens, 200)
        return output, gradient, bits[100:]  # rows whose bytes are all written

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compute(site)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute(site)
    for step in (1, 2, 1):
        site.keys.step.fill_(step)
        graph.replay()
        step_of_its_own = torch.tensor([step], device=DEVICE)
        eager = compute(replace(site, keys=replace(site.keys, step=step_of_its_own)))
        for one, other in zip(captured, eager, strict=True):
            assert torch.equal(one, other)
