"""FP8 on a GPU: casts bit for bit, products within their bounds, blocks, and scales in a graph."""

import pytest
import torch

from fp8_cases import (
    E4M3,
    E5M2,
    Case,
    assert_same,
    check_blocks,
    check_cast,
    make_keys,
    make_scales,
    step_of,
)
from graph_cases import captured as capture
from mlperf_bert.model import fp8, fp8_cast
from mlperf_bert.model.dropout_keys import make_site
from mlperf_bert.model.fp8_cast import Target

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _gpu_with_fp8(triton):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no CUDA device of capability 8.9: products in FP8 are not run on one here")


def test_casts_are_those_of_the_reference():
    check_cast(fp8.cast, fp8_cast.reference, (E4M3, E5M2), DEVICE)


def test_a_cast_adds_up_its_columns():
    values = torch.randn(300, 96, device=DEVICE, dtype=torch.bfloat16)
    apart = [part.contiguous() for part in values.split(32, dim=1)]
    for parts in (values.split(32, dim=1), apart):
        unit, maxima = torch.tensor(2.0**-4, device=DEVICE), torch.zeros(2, device=DEVICE)
        found, sums = fp8.cast_with_sums(parts, Target(E5M2, unit, maxima[0]))
        expected = fp8_cast.reference(parts, 1, Target(E5M2, unit, maxima[1]), transpose=True)
        assert_same(found, expected)
        assert maxima[0] == maxima[1]
        torch.testing.assert_close(sums.double(), values.double().sum(0), rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 17, 48, 1000])
def test_a_product_is_within_the_bounds_of_its_rounding(rows):
    (scales, (own,)), case = make_scales(DEVICE), Case(rows, DEVICE)
    for number in (1, 2):
        scales.follow(step_of(number, DEVICE))
        case.run(own)
        case.check(own)


@pytest.mark.parametrize("is_modern", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 200])
def test_fused_blocks(rows, is_modern):
    from mlperf_bert.model.fused_blocks import FusedBlocks

    for site in (None, make_site(0.3, 5, make_keys(rows, DEVICE))):
        check_blocks(FusedBlocks, rows, site, DEVICE, is_modern=is_modern)


def test_scales_of_a_captured_product_follow_the_maxima():
    (eager, (own,)), (captured, (other,)) = make_scales(DEVICE), make_scales(DEVICE)
    case, static = Case(32, DEVICE), Case(32, DEVICE)
    number = step_of(0, DEVICE)
    first = captured.tensors()
    saved = {name: tensor.clone() for name, tensor in first.items()}

    def follow_and_run():
        captured.follow(number)
        static.run(other)

    graph, _ = capture(follow_and_run)
    for name, tensor in first.items():
        tensor.copy_(saved[name])
    for step, size in ((1, 1.0), (2, 30.0), (3, 0.01)):
        for each in (case, static):
            with torch.no_grad():
                each.x.mul_(size)
        number.fill_(step)
        eager.follow(number)
        case.run(own)
        graph.replay()
        assert torch.equal(captured.state, eager.state)
        assert torch.equal(static.y, case.y)
        assert torch.equal(static.x.grad, case.x.grad)
