"""GELU (erf) of a sum, or as a gate, on a GPU: kernels with rounded results, or in FP8 only.

Only the product is kept; backward recomputes the GELU from it. In FP8 the next
operation is always an FP8 product, so nothing is written in 16 bits: 4 bytes an element are moved
forward and 6 backward, against 8 and 10 with a separate cast.

Shape letters: R rows, F feed-forward width.
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
    write_fp8,
    writing,
)
from mlperf_bert.model.triton_parts import (
    computed_in,
    empty_sums,
    kernel,
    num_row_blocks,
    sum_programs,
)

BLOCK_ROWS, BLOCK_COLUMNS = 8, 256
# Programs in backward, on every GPU, so that sums have one order. All run at once if six fit on
# each of an A100's 108 multiprocessors, or five on each of an H100's 132.
MOST_PROGRAMS = 640
# FP8 tile: half the size of a cast's. 64 elements a thread need fewer instructions each, which
# limit these kernels; a multiprocessor holds four tiles either way.
FP8_WARPS = 4
GATED_FP8_WARPS = 8  # two values are kept for each element


def bias_gelu(product: Tensor, bias: Tensor) -> Tensor:
    """GELU(product + bias) (arXiv 1606.08415): [R, F], contiguous, and [F] -> [R, F]."""
    rows, columns = product.shape
    output = torch.empty_like(product)
    grid = (triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(columns, BLOCK_COLUMNS))
    _gelu_forward[grid](
        *(product, bias, output, rows, columns, computed_in(product), BLOCK_ROWS, BLOCK_COLUMNS)
    )
    return output


def bias_gelu_backward(gradient: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of product [R, F] and bias [F] from that of the output, [R, F] and contiguous."""
    rows, columns = product.shape
    column_blocks = triton.cdiv(columns, BLOCK_COLUMNS)
    programs = num_row_blocks(rows, BLOCK_ROWS, MOST_PROGRAMS // column_blocks)
    of_product = torch.empty_like(product)
    partials = empty_sums(product, programs, 1, columns)
    _gelu_backward[(programs, column_blocks)](
        *((gradient, product, bias), (of_product, partials), rows, columns, computed_in(product)),
        *(BLOCK_ROWS, BLOCK_COLUMNS),
    )
    return of_product, sum_programs(partials, (bias.dtype,))[0]


def bias_gelu_fp8(product: Tensor, bias: Tensor, target: Target, *, transpose: bool) -> Fp8Matrix:
    """`cast` of GELU(product + bias): [R, F], contiguous, and [F]."""
    result = empty_fp8(product, product.shape, target, transpose=transpose)
    _launch_fp8(None, product, bias, None, result, target)
    return result


def bias_gelu_fp8_backward(
    gradient: Tensor, product: Tensor, bias: Tensor, target: Target
) -> tuple[Fp8Matrix, Tensor]:
    """`cast` of the product's gradient [R, F], transposed too, and the bias's [F].

    `gradient` [R, F], contiguous, is that of GELU(product + bias).
    """
    rows, columns = product.shape
    result = empty_fp8(product, product.shape, target, transpose=True)
    partials = empty_sums(product, triton.cdiv(rows, TILE_ROWS), 1, columns)
    _launch_fp8(gradient, product, bias, partials, result, target)
    return result, sum_programs(partials, (bias.dtype,))[0]


def gated(product: Tensor) -> Tensor:
    """GELU(a) * b of a product [a, b] (GeGLU, arXiv 2002.05202): [R, 2 F], contiguous -> [R, F]."""
    output = product.new_empty((len(product), product.shape[1] // 2))
    _launch_gated(None, product, output)
    return output


def gated_backward(gradient: Tensor, product: Tensor) -> Tensor:
    """The product's gradient [R, 2 F] from that of its `gated`, [R, F] and contiguous."""
    of_product = torch.empty_like(product)
    _launch_gated(gradient, product, of_product)
    return of_product


def gated_fp8(product: Tensor, target: Target, *, transpose: bool) -> Fp8Matrix:
    """`cast` of `gated`."""
    rows, columns = product.shape
    result = empty_fp8(product, (rows, columns // 2), target, transpose=transpose)
    _launch_gated_fp8(None, product, result, target)
    return result


def gated_fp8_backward(gradient: Tensor, product: Tensor, target: Target) -> Fp8Matrix:
    """`cast` of `gated_backward`, transposed too."""
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
        *((gradient, product), rows, columns, *writing(result, target)),
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
        *((gradient, product, bias, partials), rows, columns, *writing(result, target)),
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
    of_product, partials = outputs
    first = tl.program_id(0).to(tl.int64) * block_rows
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)[None, :]
    biases = tl.load(bias + column, mask=column < columns, other=0.0).to(dtype)
    total = tl.zeros((block_rows, block_columns), dtype)
    while first < rows:
        row = first + tl.arange(0, block_rows)[:, None]
        is_there = (row < rows) & (column < columns)
        at = row * columns + column
        values = tl.load(product + at, mask=is_there, other=0.0).to(dtype) + biases
        given = tl.load(gradient + at, mask=is_there, other=0.0).to(dtype)
        given *= _gelu_slope(values)
        tl.store(of_product + at, given.to(of_product.dtype.element_ty), mask=is_there)
        total += given
        first += tl.num_programs(0) * block_rows
    own = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    tl.store(partials + tl.program_id(0) * columns + own, tl.sum(total, 0), mask=own < columns)


@kernel
def _gelu_fp8(
    tensors: tl.tuple,
    rows: tl.tensor,
    columns: int,
    place: tl.tuple,
    limit: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    gradient, product, bias, partials = tensors
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    # Past the last row the GELU is zero, and so is the given gradient.
    outside = -32768.0 if gradient is None else 0.0
    values = tl.load(product + at, mask=inside, other=outside).to(tl.float32)
    values += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if gradient is not None:
        values = _gelu_slope(values) * tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        store_sums(partials, values, column, columns)
    else:
        values = _gelu(values)
    write_fp8(values, row, column, rows, columns, place, limit)


@kernel
def _gated(
    tensors: tl.tuple,
    rows: tl.tensor,
    columns: tl.tensor,
    dtype: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    """The result, or with a gradient that of the product."""
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
        given = tl.load(gradient + narrow, mask=is_there, other=0.0).to(dtype)
        of_values = given * gates * _gelu_slope(values)
        tl.store(result + wide, of_values.to(rounded), mask=is_there)
        tl.store(result + wide + columns, (given * _gelu(values)).to(rounded), mask=is_there)


@kernel
def _gated_fp8(
    tensors: tl.tuple,
    rows: tl.tensor,
    columns: int,
    place: tl.tuple,
    limit: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    """`_gated`, cast; zero past the edges."""
    gradient, product = tensors
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * (2 * columns) + column[None, :]
    values = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(product + at + columns, mask=inside, other=0.0).to(tl.float32)
    if gradient is None:
        write_fp8(_gelu(values) * gates, row, column, rows, columns, place, limit)
    else:
        narrow = row[:, None] * columns + column[None, :]
        given = tl.load(gradient + narrow, mask=inside, other=0.0).to(tl.float32)
        of_gates = given * _gelu(values)
        given *= gates * _gelu_slope(values)
        write_fp8(given, row, column, rows, columns, place, limit)
        write_fp8(of_gates, row, column + columns, rows, 2 * columns, place, limit)


@kernel
def _gelu(values: tl.tensor) -> Any:
    """z Phi(z) as max(z, 0) - |z| Phi(-|z|), which has no cancellation; NaN for infinity."""
    sizes = tl.abs(values)
    return tl.maximum(values, 0.0) - sizes * _normal_tail(sizes)


@kernel
def _gelu_slope(values: tl.tensor) -> Any:
    """Derivative of the GELU: Phi(z) + z phi(z)."""
    tail = _normal_tail(tl.abs(values))
    # exp(-z^2 / 2) / sqrt(2 pi), all of it as a power of two
    density = tl.exp2(values * values * -0.7213475204444817 - 1.3257480647361593)
    return tl.where(values < 0, tail, 1 - tail) + values * density


@kernel
def _normal_tail(sizes: tl.tensor) -> Any:
    """Phi(-z), the share of a standard normal distribution below -z, for z >= 0.

    Computed in float32 as two to the power of a polynomial that we fitted to log2 Phi(-z). The
    error of Phi is at most 8e-7, and 0.4 % of itself for z from 0 to 4, as large as rounding to
    bf16 (`triton_jobs.py` checks that). An erf takes four times the instructions, which would then
    limit the block instead of memory.
    """
    if sizes.dtype == tl.float64:
        return 0.5 - 0.5 * tl.erf(sizes * 0.7071067811865476)  # 1 / sqrt(2)
    power = sizes * 4.9354258e-04 - 7.2472368e-03
    power = power * sizes + 5.2281787e-02
    power = power * sizes + 4.5945693e-01
    power = power * sizes + 1.1510416e00
    power = power * sizes + 1.0000023e00
    return tl.exp2(-power)
