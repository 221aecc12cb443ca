"""Casts to FP8 on a GPU: one pass that scales, saturates, transposes and finds the maximum.

Shape letters: R rows, C columns.

The mathematics is that of `fp8_cast.reference`. Maxima of programs meet in one place by atomic
maxima, so nothing depends on the order in which programs run. Kernels that write FP8 end with
`write_fp8`; they all take what it needs as nine arguments in a row, `writing(...)`.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mlperf_bert.model.fp8_cast import COLUMNS_MULTIPLE, Fp8Matrix, Target, padded
from mlperf_bert.model.triton_parts import kernel

TILE = 64


def cast(parts: Sequence[Tensor], dim: int, target: Target, *, transpose: bool) -> Fp8Matrix:
    """See `fp8_cast.cast`: one launch for each part."""
    sizes = [part.shape[dim] for part in parts]
    shape = list(parts[0].shape)
    shape[dim] = sum(sizes)
    whole = empty_fp8(parts[0], shape, target, transpose=transpose)
    pieces: Sequence[Tensor | None] = [None] * len(parts)
    if whole.transposed is not None:
        pieces = whole.transposed[:, : shape[0]].split_with_sizes(sizes, 1 - dim)
    for part, rows, transposed in zip(
        parts, whole.rows.split_with_sizes(sizes, dim), pieces, strict=True
    ):
        cast_part(part, Fp8Matrix(target.unit, rows, transposed), target)
    return whole


def empty_fp8(like: Tensor, shape: Sequence[int], target: Target, *, transpose: bool) -> Fp8Matrix:
    """A matrix [R, C] not filled in, on the device of `like`; its transpose is zero behind R."""
    num_rows, num_columns = shape
    rows = like.new_empty((num_rows, num_columns), dtype=target.dtype)
    if not transpose:
        return Fp8Matrix(target.unit, rows, None)
    make = rows.new_zeros if num_rows % COLUMNS_MULTIPLE else rows.new_empty
    return Fp8Matrix(target.unit, rows, make((num_columns, padded(num_rows))))


def cast_part(x: Tensor, place: Fp8Matrix, target: Target) -> None:
    """Write `x` [R, C] to its place, views [R, C] and [C, R] of a matrix and its transpose."""
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, num_columns = x.shape
    _cast_to_fp8[(triton.cdiv(num_rows, TILE), triton.cdiv(num_columns, TILE))](
        x, num_rows, num_columns, x.stride(0), *writing(place, target), TILE
    )


def writing(place: Fp8Matrix, target: Target) -> tuple[Any, ...]:
    """What a kernel needs to write to `place`; where it wants none, a tensor that is not used."""
    rows, transposed, maximum = place.rows, place.transposed, target.maximum
    return (
        rows,
        rows if transposed is None else transposed,
        target.unit,
        target.unit if maximum is None else maximum,
        rows.stride(0),
        0 if transposed is None else transposed.stride(0),
        target.limit,
        maximum is not None,
        transposed is not None,
    )


@kernel
def _cast_to_fp8(
    x: tl.tensor,
    num_rows: int,
    num_columns: int,
    x_stride: int,
    quantised: tl.tensor,
    transposed: tl.tensor,
    unit: tl.tensor,
    maximum: tl.tensor,
    rows_stride: int,
    transposed_stride: int,
    limit: tl.constexpr,
    notes_maximum: tl.constexpr,
    transposes: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    at = row[:, None] * x_stride + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    place = quantised, transposed, unit, maximum, rows_stride, transposed_stride
    write_fp8(values, row, column, inside, place, limit, notes_maximum, transposes)


@kernel
def write_fp8(
    values: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    place: tl.tuple,
    limit: tl.constexpr,
    notes_maximum: tl.constexpr,
    transposes: tl.constexpr,
) -> None:
    """Cast a float32 tile at some rows and columns, which is zero where it is not `inside`.

    `place` is made of the first six of `writing(...)`.
    """
    quantised, transposed, unit, maximum, rows_stride, transposed_stride = place
    sizes = tl.abs(values)
    is_finite = sizes < float("inf")
    if notes_maximum:
        largest = tl.max(tl.where(is_finite, sizes, 0.0))
        # Most programs find that another's is larger: a plain load spares them the atomic one.
        tl.atomic_max(maximum, largest, mask=largest > tl.load(maximum), sem="relaxed")
    scaled = tl.minimum(tl.maximum(values * (1.0 / tl.load(unit)), -limit), limit)
    written = tl.where(is_finite, scaled, float("nan")).to(quantised.dtype.element_ty)
    tl.store(quantised + row[:, None] * rows_stride + column[None, :], written, mask=inside)
    if transposes:
        at = column[:, None] * transposed_stride + row[None, :]
        tl.store(transposed + at, tl.trans(written), mask=tl.trans(inside))
