"""Kernels on a GPU for GELU (erf) and gated GELU, with results in 16 bits or FP8.

The forward pass saves only the product, and the backward pass recomputes the GELU from it. In FP8
nothing is written in 16 bits, because the next operation is always an FP8 product. A kernel then
moves 4 bytes per element in the forward pass and 6 in the backward pass. With a separate cast, it
would move 8 and 10 bytes.

Shapes use the letters R (rows) and F (feed-forward width).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlperf_bert.model.fp8_cast import Fp8Matrix, Target
from mlperf_bert.model.triton_fp8 import (
    TILE_COLUMNS,
    TILE_ROWS,
    empty_fp8,
    store_sums,
    tile_destination,
    write_fp8,
)
from mlperf_bert.model.triton_parts import (
    computed_in,
    empty_sums,
    kernel,
    num_row_blocks,
    sum_programs,
)

BLOCK_ROWS, BLOCK_COLUMNS = 8, 256
# The upper limit on programs of the backward pass is the same on every GPU, so that sums have the
# same order everywhere. All programs run at once if six fit on each of an A100's 108
# multiprocessors, or five on each of an H100's 132.
MOST_PROGRAMS = 640
# FP8 kernels use half as many warps as a cast. Instructions limit these kernels, and with 64
# elements per thread each element needs fewer of them. A multiprocessor runs four tiles either way.
FP8_WARPS = 4
GATED_FP8_WARPS = 8  # more, because two values are kept for each element


def bias_gelu(product: Tensor, bias: Tensor) -> Tensor:
    """Compute GELU(product + bias) (arXiv 1606.08415): contiguous [R, F] and [F] -> [R, F]."""
    rows, columns = product.shape
    output = torch.empty_like(product)
    grid = (triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(columns, BLOCK_COLUMNS))
    _gelu_forward[grid](
        *(product, bias, output, rows, columns, computed_in(product), BLOCK_ROWS, BLOCK_COLUMNS)
    )
    return output


def bias_gelu_backward(gradient: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the product [R, F] and of the bias [F] of `bias_gelu`.

    `gradient` [R, F] is the contiguous gradient of the output.
    """
    rows, columns = product.shape
    column_blocks = triton.cdiv(columns, BLOCK_COLUMNS)
    programs = num_row_blocks(rows, BLOCK_ROWS, MOST_PROGRAMS // column_blocks)
    grad_product = torch.empty_like(product)
    partials = empty_sums(product, programs, 1, columns)
    _gelu_backward[(programs, column_blocks)](
        *((gradient, product, bias), (grad_product, partials), rows, columns, computed_in(product)),
        *(BLOCK_ROWS, BLOCK_COLUMNS),
    )
    return grad_product, sum_programs(partials, (bias.dtype,))[0]


def bias_gelu_fp8(product: Tensor, bias: Tensor, target: Target, *, transpose: bool) -> Fp8Matrix:
    """Compute GELU(product + bias) of contiguous [R, F] and [F], and return it in FP8."""
    result = empty_fp8(product, product.shape, target, transpose=transpose)
    _launch_fp8(None, product, bias, None, result, target)
    return result


def bias_gelu_fp8_backward(
    gradient: Tensor, product: Tensor, bias: Tensor, target: Target
) -> tuple[Fp8Matrix, Tensor]:
    """Compute the gradients of the product [R, F], in FP8 with a transpose, and of the bias [F].

    `gradient` [R, F] is the contiguous gradient of GELU(product + bias).
    """
    rows, columns = product.shape
    result = empty_fp8(product, product.shape, target, transpose=True)
    partials = empty_sums(product, triton.cdiv(rows, TILE_ROWS), 1, columns)
    _launch_fp8(gradient, product, bias, partials, result, target)
    return result, sum_programs(partials, (bias.dtype,))[0]


def gated(product: Tensor) -> Tensor:
    """Compute GELU(a) * b from a product with the halves a and b: contiguous [R, 2 F] -> [R, F].

    This is GeGLU (arXiv 2002.05202).
    """
    output = product.new_empty((len(product), product.shape[1] // 2))
    _launch_gated(None, product, output)
    return output


def gated_backward(gradient: Tensor, product: Tensor) -> Tensor:
    """Compute the gradient of the product [R, 2 F] of `gated`.

    `gradient` [R, F] is the contiguous gradient of the output.
    """
    grad_product = torch.empty_like(product)
    _launch_gated(gradient, product, grad_product)
    return grad_product


def gated_fp8(product: Tensor, target: Target, *, transpose: bool) -> Fp8Matrix:
    """Compute the gated GELU of a product, as `gated` does, and return it [R, F] in FP8."""
    rows, columns = product.shape
    result = empty_fp8(product, (rows, columns // 2), target, transpose=transpose)
    _launch_gated_fp8(None, product, result, target)
    return result


def gated_fp8_backward(gradient: Tensor, product: Tensor, target: Target) -> Fp8Matrix:
    """Compute the product's gradient as `gated_backward` does, in FP8 with a transpose."""
    result = empty_fp8(product, product.shape, target, transpose=True)
    _launch_gated_fp8(gradient, product, result, target)
    return result


def _launch_gated(gradient: Tensor | None, product: Tensor, result: Tensor) -> None:
    rows, columns = len(product), product.shape[1] // 2
    _gated[(triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(columns, BLOCK_COLUMNS))](
        *((gradient, product, result), rows, columns, computed_in(product)),
        *(BLOCK_ROWS, BLOCK_COLUMNS),
    )


def _launch_gated_fp8(
    gradient: Tensor | None, product: Tensor, result: Fp8Matrix, target: Target
) -> None:
    rows, columns = len(product), product.shape[1] // 2
    _gated_fp8[(triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS))](
        *((gradient, product), rows, columns, *tile_destination(result, target)),
        *(TILE_ROWS, TILE_COLUMNS),
        num_warps=GATED_FP8_WARPS,
    )


def _launch_fp8(
    gradient: Tensor | None,
    product: Tensor,
    bias: Tensor,
    partials: Tensor | None,
    result: Fp8Matrix,
    target: Target,
) -> None:
    rows, columns = product.shape
    _gelu_fp8[(triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS))](
        *((gradient, product, bias, partials), rows, columns, *tile_destination(result, target)),
        *(TILE_ROWS, TILE_COLUMNS),
        num_warps=FP8_WARPS,
    )


@kernel
def _gelu_forward(
    product: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    dtype: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)[:, None]
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)[None, :]
    is_there = (row < rows) & (column < columns)
    at = row * columns + column
    values = tl.load(product + at, mask=is_there, other=0.0).to(dtype)
    values += tl.load(bias + column, mask=column < columns, other=0.0).to(dtype)
    tl.store(output + at, _gelu(values).to(output.dtype.element_ty), mask=is_there)


@kernel
def _gelu_backward(
    inputs: tl.tuple,
    outputs: tl.tuple,
    rows: tl.tensor,
    columns: tl.tensor,
    dtype: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    gradient, product, bias = inputs
    grad_product, partials = outputs
    first = tl.program_id(0).to(tl.int64) * block_rows
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)[None, :]
    biases = tl.load(bias + column, mask=column < columns, other=0.0).to(dtype)
    total = tl.zeros((block_rows, block_columns), dtype)
    while first < rows:
        row = first + tl.arange(0, block_rows)[:, None]
        is_there = (row < rows) & (column < columns)
        at = row * columns + column
        values = tl.load(product + at, mask=is_there, other=0.0).to(dtype) + biases
        upstream = tl.load(gradient + at, mask=is_there, other=0.0).to(dtype)
        upstream *= _gelu_slope(values)
        tl.store(grad_product + at, upstream.to(grad_product.dtype.element_ty), mask=is_there)
        total += upstream
        first += tl.num_programs(0) * block_rows
    own = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    tl.store(partials + tl.program_id(0) * columns + own, tl.sum(total, 0), mask=own < columns)


@kernel
def _gelu_fp8(
    tensors: tl.tuple,
    rows: tl.tensor,
    columns: int,
    destination: tl.tuple,
    limit: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    gradient, product, bias, partials = tensors
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    # These values make the results zero past the last row. The GELU of -32768 is zero, and for a
    # backward pass the gradient there is loaded as zero.
    outside = -32768.0 if gradient is None else 0.0
    values = tl.load(product + at, mask=inside, other=outside).to(tl.float32)
    values += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if gradient is not None:
        values = _gelu_slope(values) * tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        store_sums(partials, values, column, columns)
    else:
        values = _gelu(values)
    write_fp8(values, row, column, rows, columns, destination, limit)


@kernel
def _gated(
    tensors: tl.tuple,
    rows: tl.tensor,
    columns: tl.tensor,
    dtype: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    """Compute the gated GELU, or the product's gradient if `gradient` is given."""
    gradient, product, result = tensors
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)[:, None]
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)[None, :]
    is_there = (row < rows) & (column < columns)
    narrow, wide = row * columns + column, row * (2 * columns) + column
    values = tl.load(product + wide, mask=is_there, other=0.0).to(dtype)
    gates = tl.load(product + wide + columns, mask=is_there, other=0.0).to(dtype)
    rounded: tl.constexpr = result.dtype.element_ty
    if gradient is None:
        tl.store(result + narrow, (_gelu(values) * gates).to(rounded), mask=is_there)
    else:
        upstream = tl.load(gradient + narrow, mask=is_there, other=0.0).to(dtype)
        grad_values = upstream * gates * _gelu_slope(values)
        tl.store(result + wide, grad_values.to(rounded), mask=is_there)
        tl.store(result + wide + columns, (upstream * _gelu(values)).to(rounded), mask=is_there)


@kernel
def _gated_fp8(
    tensors: tl.tuple,
    rows: tl.tensor,
    columns: int,
    destination: tl.tuple,
    limit: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """Compute the result of `_gated` in FP8. The values past the edges are zero."""
    gradient, product = tensors
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * (2 * columns) + column[None, :]
    values = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(product + at + columns, mask=inside, other=0.0).to(tl.float32)
    if gradient is None:
        write_fp8(_gelu(values) * gates, row, column, rows, columns, destination, limit)
    else:
        narrow = row[:, None] * columns + column[None, :]
        upstream = tl.load(gradient + narrow, mask=inside, other=0.0).to(tl.float32)
        grad_gates = upstream * _gelu(values)
        upstream *= gates * _gelu_slope(values)
        write_fp8(upstream, row, column, rows, columns, destination, limit)
        write_fp8(grad_gates, row, column + columns, rows, 2 * columns, destination, limit)


@kernel
def _gelu(values: tl.tensor) -> Any:
    """Compute z Phi(z) as max(z, 0) - |z| Phi(-|z|).

    This form avoids cancellation. The result for an infinity is NaN.
    """
    sizes = tl.abs(values)
    return tl.maximum(values, 0.0) - sizes * _normal_tail(sizes)


@kernel
def _gelu_slope(values: tl.tensor) -> Any:
    """Compute the derivative of the GELU, Phi(z) + z phi(z)."""
    tail = _normal_tail(tl.abs(values))
    # This is exp(-z^2 / 2) / sqrt(2 pi), written as a single power of two.
    density = tl.exp2(values * values * -0.7213475204444817 - 1.3257480647361593)
    return tl.where(values < 0, tail, 1 - tail) + values * density


@kernel
def _normal_tail(sizes: tl.tensor) -> Any:
    """Compute Phi(-z), the fraction of a standard normal distribution below -z, for z >= 0.

    In float32 the result is two to the power of a polynomial that was fitted to log2 Phi(-z). The
    absolute error of Phi is at most 8e-7. The relative error is at most 0.4% for z from 0 to 4,
    which is as large as the error of rounding to bf16. (`triton_jobs.py` checks the GELU's errors.)
    An erf would take four times as many instructions, and the kernel would then be limited by
    instructions instead of memory.
    """
    if sizes.dtype == tl.float64:
        return 0.5 - 0.5 * tl.erf(sizes * 0.7071067811865476)  # 1 / sqrt(2)
    power = sizes * 4.9354258e-04 - 7.2472368e-03
    power = power * sizes + 5.2281787e-02
    power = power * sizes + 4.5945693e-01
    power = power * sizes + 1.1510416e00
    power = power * sizes + 1.0000023e00
    return tl.exp2(-power)
