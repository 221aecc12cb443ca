"""Casts to FP8 on a GPU that scale, saturate, transpose and find the maximum in one pass.

Shapes use the letters R (rows) and C (columns).

The results are those of `fp8_cast.reference`. Programs combine their maxima with an atomic maximum,
so the result does not depend on the order of the programs. Kernels that process tiles end with a
call of `write_fp8`, whose arguments come from `tile_destination(...)`. Kernels that process rows
call `to_fp8`.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mlperf_bert.model.blocks import side_by_side
from mlperf_bert.model.fp8_cast import Fp8Matrix, Target, padded
from mlperf_bert.model.triton_parts import empty_sums, kernel, sum_programs

# Tile of a program. It has 32 elements per thread, so that most of the work of summing over rows is
# plain additions within a thread. The transpose is written in lines of 128 bytes.
TILE_ROWS, TILE_COLUMNS, NUM_WARPS = 128, 64, 8
TRANSPOSED_TILE = 128  # tile of the kernel that only transposes


def cast(parts: Sequence[Tensor], dim: int, target: Target, *, transpose: bool) -> Fp8Matrix:
    """Join matrices along `dim` and cast the result to FP8, with one launch per matrix.

    See `fp8.cast`.
    """
    sizes = [part.shape[dim] for part in parts]
    shape = list(parts[0].shape)
    shape[dim] = sum(sizes)
    whole = empty_fp8(parts[0], shape, target, transpose=transpose)
    pieces: Iterable[Tensor | None] = repeat(None, len(parts))
    if whole.transposed is not None:
        in_transposed = [*sizes[:-1], sizes[-1] + whole.transposed.shape[1 - dim] - shape[dim]]
        pieces = whole.transposed.split_with_sizes(in_transposed, 1 - dim)
    destinations = zip(parts, whole.rows.split_with_sizes(sizes, dim), pieces, strict=True)
    for part, rows, transposed in destinations:
        cast_part(part, Fp8Matrix(target.unit, rows, transposed), target)
    return whole


def empty_fp8(like: Tensor, shape: Sequence[int], target: Target, *, transpose: bool) -> Fp8Matrix:
    """Allocate an FP8 matrix [R, C] on the device of `like`, and its transpose if requested."""
    num_rows, num_columns = shape
    rows = like.new_empty((num_rows, num_columns), dtype=target.dtype)
    if not transpose:
        return Fp8Matrix(target.unit, rows, None)
    return Fp8Matrix(target.unit, rows, rows.new_empty((num_columns, padded(num_rows))))


def cast_with_sums(parts: Sequence[Tensor], target: Target) -> tuple[Fp8Matrix, Tensor]:
    """Join the columns of parts, cast the result to FP8, and sum each column over the rows.

    The kernel is launched once. Parts that are not adjacent columns of one tensor are concatenated
    first. See `fp8.cast_with_sums`.
    """
    whole = side_by_side(tuple(parts))
    partials = empty_sums(whole, triton.cdiv(len(whole), TILE_ROWS), 1, whole.shape[1])
    result = empty_fp8(whole, whole.shape, target, transpose=True)
    cast_part(whole, result, target, partials)
    return result, sum_programs(partials, (whole.dtype,))[0]


def cast_part(x: Tensor, result: Fp8Matrix, target: Target, partials: Tensor | None = None) -> None:
    """Cast `x` [R, C] to FP8 and write it to `result`, whose tensors may be views.

    The tensors are a matrix [R, C], and its transpose [C, R or more] or None. If `partials` is
    given, float32 [row tiles, 1, C], it receives the sums over each tile's rows.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, num_columns = x.shape
    _cast_to_fp8[(triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(num_columns, TILE_COLUMNS))](
        *((x, partials), num_rows, num_columns, x.stride(0), *tile_destination(result, target)),
        *(TILE_ROWS, TILE_COLUMNS),
        num_warps=NUM_WARPS,
    )


def with_transpose(rows: Tensor, target: Target) -> Fp8Matrix:
    """Return a contiguous FP8 matrix [R, C] together with its transpose.

    Another kernel has already written `rows`.
    """
    num_rows, num_columns = rows.shape
    transposed = rows.new_empty((num_columns, padded(num_rows)))
    _transpose[(triton.cdiv(num_rows, TRANSPOSED_TILE), triton.cdiv(num_columns, TRANSPOSED_TILE))](
        *(rows, transposed, num_rows, num_columns, transposed.shape[1], TRANSPOSED_TILE),
        num_warps=NUM_WARPS,
    )
    return Fp8Matrix(target.unit, rows, transposed)


def tile_destination(matrix: Fp8Matrix, target: Target) -> tuple[Any, ...]:
    """Return the arguments `destination` and `limit` that make `write_fp8` write to `matrix`."""
    rows, transposed = matrix.rows, matrix.transposed
    strides = (0, 0) if transposed is None else (transposed.stride(0), transposed.shape[1])
    destination = (rows, transposed, target.unit, target.maximum, rows.stride(0), *strides)
    return destination, target.limit


def row_destination(rows: Tensor | None, target: Target | None) -> tuple[Any, ...]:
    """Return the arguments for a kernel that writes rows in FP8 without a transpose.

    If `target` is None, the arguments make the kernel write no FP8.
    """
    if target is None:
        return (None, None, None), 0.0
    return (rows, target.unit, target.maximum), target.limit


@kernel
def _cast_to_fp8(
    tensors: tl.tuple,
    num_rows: int,
    num_columns: int,
    x_stride: int,
    destination: tl.tuple,
    limit: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> None:
    x, partials = tensors
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    at = row[:, None] * x_stride + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if partials is not None:
        store_sums(partials, values, column, num_columns)
    write_fp8(values, row, column, num_rows, num_columns, destination, limit)


@kernel
def store_sums(partials: tl.tensor, values: tl.tensor, column: tl.tensor, num_columns: int) -> None:
    """Write the sums over a tile's rows to this program's row of `partials`."""
    own = partials + tl.program_id(0).to(tl.int64) * num_columns + column
    tl.store(own, tl.sum(values, 0), mask=column < num_columns)


@kernel
def write_fp8(
    values: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    num_rows: int,
    num_columns: int,
    destination: tl.tuple,
    limit: tl.constexpr,
) -> None:
    """Cast a float32 tile of a matrix [num_rows, num_columns] and write it.

    The tile must be zero past the matrix's edges. `destination` and `limit` come from
    `tile_destination`.
    """
    quantized, transposed, unit, maximum, rows_stride, transposed_stride, width = destination
    written = to_fp8(values, quantized, unit, maximum, limit)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tl.store(quantized + row[:, None] * rows_stride + column[None, :], written, mask=inside)
    if transposed is not None:
        _store_transposed(transposed, transposed_stride, width, written, row, column, num_columns)


@kernel
def to_fp8(
    values: tl.tensor,
    quantized: tl.tensor,
    unit: tl.tensor,
    maximum: tl.tensor,
    limit: tl.constexpr,
) -> Any:
    """Cast float32 `values` to the dtype that `quantized` points to, and record their maximum."""
    largest = tl.reduce(tl.abs(values), None, _larger_or_nan)
    # Elements are checked one by one only if a non-finite one exists. This is a loop, because with
    # an `if` Triton 3.6 would compute the values a second time in the transpose's layout.
    while not largest < float("inf"):
        values, largest = finite_or_nan(values, None)
    record(maximum, largest)
    return cast_scaled(values, quantized, 1.0 / tl.load(unit), limit)


@kernel
def record(maximum: tl.tensor, largest: tl.tensor) -> None:
    """Raise the value at `maximum`, which may be None, to `largest`."""
    if maximum is not None:
        # Most programs find that a larger maximum is already stored, so a plain load saves them the
        # atomic operation.
        tl.atomic_max(maximum, largest, mask=largest > tl.load(maximum), sem="relaxed")


@kernel
def cast_scaled(
    values: tl.tensor, quantized: tl.tensor, factor: tl.tensor, limit: tl.constexpr
) -> Any:
    """Multiply `values` by `factor`, and cast them to the dtype that `quantized` points to."""
    values *= factor
    if quantized.dtype.element_ty == tl.float32:  # the conversions to FP8 saturate by themselves
        values = tl.where(values == values, tl.minimum(tl.maximum(values, -limit), limit), values)
    return values.to(quantized.dtype.element_ty)


@kernel
def finite_or_nan(values: tl.tensor, axis: tl.constexpr) -> Any:
    """Replace non-finite values by NaN, and find the largest |value| of the finite ones."""
    is_finite = tl.abs(values) < float("inf")
    largest = tl.max(tl.where(is_finite, tl.abs(values), 0.0), axis)
    return tl.where(is_finite, values, float("nan")), largest


@kernel
def _store_transposed(
    transposed: tl.tensor,
    stride: int,
    width: int,
    tile: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    num_columns: int,
) -> None:
    """Write a tile to the transpose, up to its `width`.

    `width` is the number of rows, rounded up to a multiple of 16. The mask uses `width` instead of
    the number of rows, so that the compiler knows that stores can be 16 bytes wide.
    """
    at = column[:, None] * stride + row[None, :]
    mask = (column < num_columns)[:, None] & (row < width)[None, :]
    tl.store(transposed + at, tl.trans(tile), mask=mask)


@kernel
def _transpose(
    matrix: tl.tensor,  # if it were named `rows`, Triton would ignore its alignment
    transposed: tl.tensor,
    num_rows: int,
    num_columns: int,
    width: int,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    at = row[:, None] * num_columns + column[None, :]
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    values = tl.load(matrix + at, mask=mask, other=0.0)
    _store_transposed(transposed, width, width, values, row, column, num_columns)


@kernel
def _larger_or_nan(one: tl.tensor, other: tl.tensor) -> Any:
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)
