"""Bias, dropout, residual sum and LayerNorm on a GPU, beside whose results their FP8 copies leave.

As `triton_norm.py`, but for bfloat16 alone, and several rows at a time: a transpose is written in
pieces as long as a program has rows. A matrix must have fewer than 2**31 elements.

Shape letters: R rows, D hidden.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlperf_bert.model.fp8_cast import Fp8Matrix, Target
from mlperf_bert.model.triton_fp8 import empty_fp8, write_fp8, writing
from mlperf_bert.model.triton_norm_tiles import drop_tile, norm_gradient_of_tile, sum_of_tile
from mlperf_bert.model.triton_parts import empty_sums, kernel, sum_programs

MOST_ROWS = 16  # of a program
# Of a program's rows, in 16 warps: what fits into registers (compiled for sm_90, D 1,024).
FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 16384, 8192
MOST_PROGRAMS = 512  # in backward, on every GPU, so that sums have one order


def residual_norm_fp8(
    product: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    epsilon: float,
    keep: Tensor | None,
    scale: float,
    target: Target,
    *,
    transpose: bool,
) -> tuple[Tensor, Tensor, Fp8Matrix]:
    """`residual_norm` and `cast` of its result; arguments as there, all bfloat16.

    Returns:
        The result [R, D], the statistics float32 [2, R], and the result in FP8.
    """
    num_rows, size = product.shape
    output = torch.empty_like(product)
    statistics = empty_sums(product, 2, num_rows)
    result8 = empty_fp8(product, product.shape, target, transpose=transpose)
    block_rows, block_columns, num_warps = _block(size, FORWARD_ELEMENTS)
    _norm_fp8_forward[(triton.cdiv(num_rows, block_rows),)](
        product,
        bias,
        residual,
        weight,
        norm_bias,
        product if keep is None else keep,
        output,
        statistics,
        num_rows,
        size,
        epsilon,
        scale,
        keep is not None,
        *writing(result8, target),
        block_rows,
        block_columns,
        num_warps=num_warps,
    )
    return output, statistics, result8


def residual_norm_fp8_backward(
    gradient: Tensor,
    product: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    statistics: Tensor,
    keep: Tensor | None,
    scale: float,
    target: Target,
) -> tuple[Fp8Matrix, Tensor, tuple[Tensor, ...]]:
    """Gradients of `residual_norm_fp8`, whose arguments and statistics these are.

    `gradient` [R, D], contiguous, is that of the result.

    Returns:
        That of the product in FP8 alone, transposed too; that of the residual [R, D]; those of
        bias, weight and norm_bias [D].
    """
    num_rows, size = product.shape
    of_residual = torch.empty_like(residual)
    of_product = empty_fp8(product, product.shape, target, transpose=True)
    block_rows, block_columns, num_warps = _block(size, BACKWARD_ELEMENTS)
    programs = min(triton.cdiv(num_rows, block_rows), MOST_PROGRAMS)
    partials = empty_sums(statistics, programs, 3, size)
    _norm_fp8_backward[(programs,)](
        gradient,
        product,
        bias,
        residual,
        weight,
        statistics,
        product if keep is None else keep,
        of_residual,
        partials,
        num_rows,
        size,
        scale,
        keep is not None,
        *writing(of_product, target),
        block_rows,
        block_columns,
        num_warps=num_warps,
    )
    sums = sum_programs(partials, (bias.dtype, weight.dtype, weight.dtype))
    return of_product, of_residual, sums


def _block(size: int, most_elements: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps."""
    columns: int = triton.next_power_of_2(size)
    rows = min(max(most_elements // columns, 1), MOST_ROWS)
    return rows, columns, min(max(16 * rows * columns // most_elements, 1), 16)


@kernel
def _norm_fp8_forward(
    product: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    norm_bias: tl.tensor,
    keep: tl.tensor,
    output: tl.tensor,
    statistics: tl.tensor,
    num_rows: int,
    size: tl.constexpr,
    epsilon: tl.constexpr,
    scale: tl.constexpr,
    has_keep: tl.constexpr,
    quantised: tl.tensor,
    transposed: tl.tensor,
    unit: tl.tensor,
    maximum: tl.tensor,
    rows_stride: int,
    transposed_stride: int,
    limit: tl.constexpr,
    notes_maximum: tl.constexpr,
    transposes: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block_columns)
    inside = (row < num_rows)[:, None] & (column < size)[None, :]
    total = sum_of_tile(
        product, bias, residual, keep, row, num_rows, column, inside, size, scale, has_keep
    )
    mean = tl.sum(total, 1) / size
    centered = tl.where(inside, total - mean[:, None], 0.0)
    inverse_deviation = 1 / tl.sqrt(tl.sum(centered * centered, 1) / size + epsilon)
    tl.store(statistics + row, mean, mask=row < num_rows)
    tl.store(statistics + num_rows + row, inverse_deviation, mask=row < num_rows)
    weights = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    biases = tl.load(norm_bias + column, mask=column < size, other=0.0).to(tl.float32)
    values = centered * inverse_deviation[:, None] * weights[None, :] + biases[None, :]
    # What is cast is what is written, and nothing behind the last row.
    written = tl.where(inside, values, 0.0).to(output.dtype.element_ty)
    tl.store(output + row[:, None] * size + column[None, :], written, mask=inside)
    values = written.to(tl.float32)
    place = quantised, transposed, unit, maximum, rows_stride, transposed_stride
    write_fp8(values, row, column, inside, place, limit, notes_maximum, transposes)


@kernel
def _norm_fp8_backward(
    gradient: tl.tensor,
    product: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    statistics: tl.tensor,
    keep: tl.tensor,
    of_residual: tl.tensor,
    partials: tl.tensor,
    num_rows: int,
    size: tl.constexpr,
    scale: tl.constexpr,
    has_keep: tl.constexpr,
    quantised: tl.tensor,
    transposed: tl.tensor,
    unit: tl.tensor,
    maximum: tl.tensor,
    rows_stride: int,
    transposed_stride: int,
    limit: tl.constexpr,
    notes_maximum: tl.constexpr,
    transposes: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    column = tl.arange(0, block_columns)
    weights = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    of_bias = tl.zeros((block_rows, block_columns), tl.float32)
    of_weight = tl.zeros((block_rows, block_columns), tl.float32)
    of_norm_bias = tl.zeros((block_rows, block_columns), tl.float32)
    first = tl.program_id(0) * block_rows
    while first < num_rows:
        row = first + tl.arange(0, block_rows)
        inside = (row < num_rows)[:, None] & (column < size)[None, :]
        at = row[:, None] * size + column[None, :]
        total = sum_of_tile(
            product, bias, residual, keep, row, num_rows, column, inside, size, scale, has_keep
        )
        given = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        normalised, of_total = norm_gradient_of_tile(
            given, total, weights, statistics, row, num_rows, inside, size
        )
        of_weight += given * normalised
        of_norm_bias += given
        tl.store(of_residual + at, of_total.to(of_residual.dtype.element_ty), mask=inside)
        if has_keep:
            of_total = drop_tile(of_total, keep, row, num_rows, size, scale)
        of_bias += of_total
        place = quantised, transposed, unit, maximum, rows_stride, transposed_stride
        write_fp8(of_total, row, column, inside, place, limit, notes_maximum, transposes)
        first += tl.num_programs(0) * block_rows
    own = partials + tl.program_id(0) * 3 * size + column
    tl.store(own, tl.sum(of_bias, 0), mask=column < size)
    tl.store(own + size, tl.sum(of_weight, 0), mask=column < size)
    tl.store(own + 2 * size, tl.sum(of_norm_bias, 0), mask=column < size)
