"""Bias and GELU (erf) on a GPU whose results, forward and backward, leave the kernel in FP8 alone.

What follows is a product in FP8 each time, so nothing is written in 16 bits and read again: 4 bytes
an element are moved forward and 6 backward, which would be 8 and 10 with a cast of its own.

Shape letters: R rows, F feed-forward width.
"""

import triton
import triton.language as tl
from torch import Tensor

from mlperf_bert.model.fp8_cast import Fp8Matrix, Target
from mlperf_bert.model.triton_fp8 import (
    TILE_COLUMNS,
    TILE_ROWS,
    empty_fp8,
    store_sums,
    write_fp8,
    writing,
)
from mlperf_bert.model.triton_gelu import gelu, gelu_slope
from mlperf_bert.model.triton_parts import empty_sums, kernel, sum_programs

# Of a tile: half of what a cast takes. 64 elements a thread need fewer instructions each, for which
# these kernels wait; four tiles are on a multiprocessor either way.
NUM_WARPS = 4


def bias_gelu_fp8(product: Tensor, bias: Tensor, target: Target, *, transpose: bool) -> Fp8Matrix:
    """`cast` of GELU(product + bias): [R, F], contiguous, and [F]."""
    result = empty_fp8(product, product.shape, target, transpose=transpose)
    _launch(None, product, bias, None, result, target)
    return result


def bias_gelu_fp8_backward(
    gradient: Tensor, product: Tensor, bias: Tensor, target: Target
) -> tuple[Fp8Matrix, Tensor]:
    """`cast` of the product's gradient [R, F], transposed too, and the bias's [F].

    `gradient` [R, F], contiguous, is that of GELU(product + bias).
    """
    num_rows, num_columns = product.shape
    result = empty_fp8(product, product.shape, target, transpose=True)
    partials = empty_sums(product, triton.cdiv(num_rows, TILE_ROWS), 1, num_columns)
    _launch(gradient, product, bias, partials, result, target)
    return result, sum_programs(partials, (bias.dtype,))[0]


def _launch(
    gradient: Tensor | None,
    product: Tensor,
    bias: Tensor,
    partials: Tensor | None,
    result: Fp8Matrix,
    target: Target,
) -> None:
    num_rows, num_columns = product.shape
    _gelu_fp8[(triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(num_columns, TILE_COLUMNS))](
        product if gradient is None else gradient,
        product,
        bias,
        bias if partials is None else partials,
        num_rows,
        num_columns,
        gradient is not None,
        *writing(result, target),
        TILE_ROWS,
        TILE_COLUMNS,
        num_warps=NUM_WARPS,
    )


@kernel
def _gelu_fp8(
    gradient: tl.tensor,
    product: tl.tensor,
    bias: tl.tensor,
    partials: tl.tensor,
    num_rows: int,
    num_columns: int,
    is_backward: tl.constexpr,
    quantised: tl.tensor,
    transposed: tl.tensor,
    unit: tl.tensor,
    maximum: tl.tensor,
    rows_stride: int,
    transposed_stride: int,
    transposed_columns: int,
    limit: tl.constexpr,
    notes_maximum: tl.constexpr,
    transposes: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    at = row[:, None] * num_columns + column[None, :]
    # Behind the last row the GELU is zero, and so is the gradient that is given.
    outside = 0.0 if is_backward else -32768.0
    values = tl.load(product + at, mask=inside, other=outside).to(tl.float32)
    values += tl.load(bias + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    if is_backward:
        values = gelu_slope(values) * tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        store_sums(partials, values, column, num_columns)
    else:
        values = gelu(values)
    place = quantised, transposed, unit, maximum, rows_stride, transposed_stride, transposed_columns
    write_fp8(values, row, column, num_rows, num_columns, place, limit, notes_maximum, transposes)
