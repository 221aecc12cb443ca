"""Casts to FP8 on a GPU: one pass that scales, saturates, transposes and finds the maximum.

Shape letters: R rows, C columns.

The mathematics is that of `fp8_cast.reference`. Programs combine their maxima by an atomic maximum,
so nothing depends on the order in which they run. Kernels of tiles end with `write_fp8` and take
its arguments together, from `writing(...)`; kernels of rows call `to_fp8`.
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

# Tile of a program: 32 elements a thread, so that the sums over rows are hardly more than
# additions. The transpose is written in lines of 128 bytes.
TILE_ROWS, TILE_COLUMNS, NUM_WARPS = 128, 64, 8
TRANSPOSED_TILE = 128  # tile of a copy that is only transposed


def cast(parts: Sequence[Tensor], dim: int, target: Target, *, transpose: bool) -> Fp8Matrix:
    """See `fp8_cast.cast`: one launch for each part."""
    sizes = [part.shape[dim] for part in parts]
    shape = list(parts[0].shape)
    shape[dim] = sum(sizes)
    whole = empty_fp8(parts[0], shape, target, transpose=transpose)
    pieces: Iterable[Tensor | None] = repeat(None, len(parts))
    if whole.transposed is not None:
        in_transposed = [*sizes[:-1], sizes[-1] + whole.transposed.shape[1 - dim] - shape[dim]]
        pieces = whole.transposed.split_with_sizes(in_transposed, 1 - dim)
    places = zip(parts, whole.rows.split_with_sizes(sizes, dim), pieces, strict=True)
    for part, rows, transposed in places:
        cast_part(part, Fp8Matrix(target.unit, rows, transposed), target)
    return whole


def empty_fp8(like: Tensor, shape: Sequence[int], target: Target, *, transpose: bool) -> Fp8Matrix:
    """An uninitialised [R, C] matrix and, if requested, its transpose, on the device of `like`."""
    num_rows, num_columns = shape
    rows = like.new_empty((num_rows, num_columns), dtype=target.dtype)
    if not transpose:
        return Fp8Matrix(target.unit, rows, None)
    return Fp8Matrix(target.unit, rows, rows.new_empty((num_columns, padded(num_rows))))


def cast_with_sums(parts: Sequence[Tensor], target: Target) -> tuple[Fp8Matrix, Tensor]:
    """See `fp8_cast.cast_with_sums`: one launch where the parts lie side by side already."""
    whole = side_by_side(tuple(parts))
    partials = empty_sums(whole, triton.cdiv(len(whole), TILE_ROWS), 1, whole.shape[1])
    place = empty_fp8(whole, whole.shape, target, transpose=True)
    cast_part(whole, place, target, partials)
    return place, sum_programs(partials, (whole.dtype,))[0]


def cast_part(x: Tensor, place: Fp8Matrix, target: Target, partials: Tensor | None = None) -> None:
    """Write `x` [R, C] to its place: views [R, C] of a matrix and [C, R or more] of its transpose.

    `partials` float32 [row tiles, 1, C] receives the sums over each tile's rows.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, num_columns = x.shape
    _cast_to_fp8[(triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(num_columns, TILE_COLUMNS))](
        *((x, partials), num_rows, num_columns, x.stride(0), *writing(place, target)),
        *(TILE_ROWS, TILE_COLUMNS),
        num_warps=NUM_WARPS,
    )


def beside_transpose(rows: Tensor, target: Target) -> Fp8Matrix:
    """A matrix [R, C] that a kernel has written in FP8, contiguous, and its transpose."""
    num_rows, num_columns = rows.shape
    transposed = rows.new_empty((num_columns, padded(num_rows)))
    _transpose[(triton.cdiv(num_rows, TRANSPOSED_TILE), triton.cdiv(num_columns, TRANSPOSED_TILE))](
        *(rows, transposed, num_rows, num_columns, transposed.shape[1], TRANSPOSED_TILE),
        num_warps=NUM_WARPS,
    )
    return Fp8Matrix(target.unit, rows, transposed)


def writing(place: Fp8Matrix, target: Target) -> tuple[Any, ...]:
    """Arguments of `write_fp8` that write to `place`: a tuple, and the limit."""
    rows, transposed = place.rows, place.transposed
    strides = (0, 0) if transposed is None else (transposed.stride(0), transposed.shape[1])
    where = (rows, transposed, target.unit, target.maximum, rows.stride(0), *strides)
    return where, target.limit


def writing_rows(rows: Tensor | None, target: Target | None) -> tuple[Any, ...]:
    """Arguments of a kernel that writes `rows` in FP8 without a transpose, or no FP8 at all."""
    if target is None:
        return (None, None, None), 0.0
    return (rows, target.unit, target.maximum), target.limit


@kernel
def _cast_to_fp8(
    tensors: tl.tuple,
    num_rows: int,
    num_columns: int,
    x_stride: int,
    place: tl.tuple,
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
    write_fp8(values, row, column, num_rows, num_columns, place, limit)


@kernel
def store_sums(partials: tl.tensor, values: tl.tensor, column: tl.tensor, num_columns: int) -> None:
    """Write a tile's sums over its rows to this program's row of `partials`."""
    own = partials + tl.program_id(0).to(tl.int64) * num_columns + column
    tl.store(own, tl.sum(values, 0), mask=column < num_columns)


@kernel
def write_fp8(
    values: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    num_rows: int,
    num_columns: int,
    place: tl.tuple,
    limit: tl.constexpr,
) -> None:
    """Cast a float32 tile of a matrix [num_rows, num_columns]; it is zero past the edges.

    `place` and `limit` come from `writing`.
    """
    quantised, transposed, unit, maximum, rows_stride, transposed_stride, width = place
    written = to_fp8(values, quantised, unit, maximum, limit, True)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tl.store(quantised + row[:, None] * rows_stride + column[None, :], written, mask=inside)
    if transposed is not None:
        _store_transposed(transposed, transposed_stride, width, written, row, column, num_columns)


@kernel
def to_fp8(
    values: tl.tensor,
    quantised: tl.tensor,
    unit: tl.tensor,
    maximum: tl.tensor,
    limit: tl.constexpr,
    looks_first: tl.constexpr,
) -> Any:
    """Float32 `values` in the type that `quantised` points to; their maximum is recorded.

    With `looks_first`, elements are checked one by one only if a non-finite one exists, which takes
    fewer instructions and more registers.
    """
    if looks_first:
        largest = tl.reduce(tl.abs(values), None, _larger_or_nan)
        # A loop, not `if`: so Triton 3.6 does not compute the values a second time in the
        # transpose's layout.
        while not largest < float("inf"):
            values, largest = _finite_or_nan(values)
    else:
        values, largest = _finite_or_nan(values)
    if maximum is not None:
        # Most programs find a larger maximum already there: a plain load spares them the atomic
        # one.
        tl.atomic_max(maximum, largest, mask=largest > tl.load(maximum), sem="relaxed")
    scaled = values * (1.0 / tl.load(unit))
    if quantised.dtype.element_ty == tl.float32:  # the conversions to FP8 saturate by themselves
        scaled = tl.where(scaled == scaled, tl.minimum(tl.maximum(scaled, -limit), limit), scaled)
    return scaled.to(quantised.dtype.element_ty)


@kernel
def _finite_or_nan(values: tl.tensor) -> Any:
    """The values, NaN if not finite, and the largest |value| of the finite ones."""
    is_finite = tl.abs(values) < float("inf")
    largest = tl.max(tl.where(is_finite, tl.abs(values), 0.0))
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
    """Write a tile to the transpose, up to its `width`, a multiple of 16 behind the last row.

    From `width`, not from the number of rows, the compiler learns that stores can be 16 bytes wide.
    """
    at = column[:, None] * stride + row[None, :]
    mask = (column < num_columns)[:, None] & (row < width)[None, :]
    tl.store(transposed + at, tl.trans(tile), mask=mask)


@kernel
def _transpose(
    matrix: tl.tensor,  # under the name `rows` its alignment would be ignored
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
