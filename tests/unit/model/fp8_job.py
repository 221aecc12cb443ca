"""What test_fp8.py runs by itself: the kernels in Triton's interpreter, without a GPU.

The interpreter has to be chosen before triton is imported. It rounds to FP8 wrongly (1.99 to 1), so
there they write float32, which is compared or rounded by torch. How compiled kernels round,
`test_kernel_gate.py` looks at.
"""

import math
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from fp8_cases import (
    E4M3,
    E5M2,
    SHAPES,
    check_blocks,
    check_cast,
    make_keys,
    make_layers,
    scales_of,
    values_of,
)
from mlperf_bert.model import fp8_cast, fused_blocks, triton_fp8
from mlperf_bert.model.dropout_keys import make_site
from mlperf_bert.model.fp8_cast import Fp8Matrix, Target
from mlperf_bert.model.fused_blocks import FusedBlocks
from mlperf_bert.model.triton_gelu import bias_gelu_fp8, bias_gelu_fp8_backward

UNIT = 0.25
# Name and which of the results is in FP8: all, or a matrix without its transpose.
KERNELS = {
    **{"bias_gelu_fp8": None, "bias_gelu_fp8_backward": 0},
    **{"residual_norm": 2, "residual_norm_backward": 0},
}


def interpret() -> None:
    for dtype, shape in product((E4M3, E5M2), SHAPES):
        cast_in_float32(values_of(shape), dtype)
    # Where each of several parts comes to lie.
    check_cast(triton_fp8.cast, fp8_cast.reference, (torch.float32,), "cpu")
    for shape in SHAPES:
        gelu_in_float32(*shape)
        sums_in_float32(*shape)
    for name, place in KERNELS.items():
        setattr(fused_blocks, name, rounded_by_torch(getattr(fused_blocks, name), place))
    copies_are_taken()
    for rows in (1, 17):
        check_blocks(FusedBlocks, rows, None, "cpu")
        check_blocks(FusedBlocks, rows, make_site(0.3, 5, make_keys(rows, "cpu")), "cpu")


class InFloat32(Target):
    """Where a matrix in float32 stands for one in FP8."""


def copies_are_taken() -> None:
    """A product reads the FP8 copy that its input carries, and takes it away."""
    made = make_layers(17, "cpu")
    layers, hidden = made
    blocks = FusedBlocks(scales_of(made, "cpu"))
    attended = blocks.residual_output(
        hidden, hidden, layers["first"], layers["norm_of_first"], None
    )
    copy = attended.fp8
    exact = attended.detach().float() / copy.unit
    torch.testing.assert_close(copy.rows.float(), exact, rtol=2**-4, atol=2**-10)
    wide = blocks.intermediate(attended, layers["wide"])
    assert not hasattr(attended, "fp8") and hasattr(wide, "fp8")
    assert wide.isnan().all()  # whoever reads it in another way will notice


def rounded_by_torch(kernel: Callable[..., Any], place: int | None) -> Callable[..., Any]:
    """The same in float32, then in FP8: the result, or that at `place` of several."""

    def run(*arguments: Any, **options: Any) -> Any:
        *others, target = arguments
        if target is None:
            return kernel(*arguments, **options)
        found = kernel(*others, Target(torch.float32, target.unit, target.maximum), **options)
        if place is None:
            return in_fp8(found, target)
        return *found[:place], in_fp8(found[place], target), *found[place + 1 :]

    return run


def in_fp8(found: Tensor | Fp8Matrix, target: Target) -> Any:
    if isinstance(found, Tensor):
        return found.clamp(-target.limit, target.limit).to(target.dtype)
    both = (in_fp8(each, target) for each in (found.rows, found.transposed))
    return Fp8Matrix(found.unit, *both)


def cast_in_float32(x: Tensor, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    rows = torch.full((x.shape[0], x.shape[1] + 3), 7.0)
    width = fp8_cast.padded(x.shape[0])
    transposed = torch.full((x.shape[1], width + 3), 7.0)
    own = rows[:, : x.shape[1]], transposed[:, :width]
    unit = torch.tensor(UNIT)
    triton_fp8.cast_part(x, Fp8Matrix(unit, *own), InFloat32(dtype, unit, None))
    exact = (x.float() / UNIT).clamp(-limit, limit).masked_fill(~x.isfinite(), math.nan)
    padded = F.pad(exact, (0, 0, 0, width - len(x)))  # zeros behind the last row
    for found, expected in zip(own, (exact, padded.t()), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert (rows[:, x.shape[1] :] == 7).all() and (transposed[:, width:] == 7).all()


def gelu_in_float32(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    gradient, x = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    bias = torch.randn(columns, generator=generator)
    exact, exact_bias = x.double().requires_grad_(), bias.double().requires_grad_()
    result = F.gelu(exact + exact_bias)
    result.backward(gradient.double())
    maximum = torch.zeros(())
    target = Target(torch.float32, torch.tensor(UNIT), maximum)
    found = bias_gelu_fp8(x, bias, target, transpose=True)
    check_matrix(found, result.detach(), maximum)
    maximum.zero_()
    found, of_bias = bias_gelu_fp8_backward(gradient, x, bias, target)
    check_matrix(found, exact.grad, maximum)
    torch.testing.assert_close(of_bias.double(), exact_bias.grad, rtol=1e-5, atol=1e-5)


def sums_in_float32(rows: int, columns: int) -> None:
    """Of gradients that lie side by side, and of others, beside their copies."""
    joined = torch.randn(rows, 2 * columns, generator=torch.Generator().manual_seed(rows))
    for parts in (joined.split(columns, dim=1), (joined[:, :columns].clone(), joined[:, columns:])):
        maximum = torch.zeros(())
        target = Target(torch.float32, torch.tensor(UNIT), maximum)
        found, sums = triton_fp8.cast_with_sums(parts, target)
        check_matrix(found, joined.double(), maximum)
        torch.testing.assert_close(sums.double(), joined.double().sum(0), rtol=1e-5, atol=1e-5)


def check_matrix(found: Fp8Matrix, exact: Tensor, maximum: Tensor) -> None:
    torch.testing.assert_close(found.rows.double() * UNIT, exact, rtol=1e-5, atol=4e-6)
    num_rows = len(exact)
    assert torch.equal(found.transposed[:, :num_rows], found.rows.t())
    assert not found.transposed[:, num_rows:].any()
    assert maximum == found.rows.abs().max() * UNIT


if __name__ == "__main__":
    interpret()
