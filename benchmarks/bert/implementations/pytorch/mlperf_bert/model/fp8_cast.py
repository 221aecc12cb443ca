"""Readable casts to FP8: divide by a unit, saturate, transpose, record the largest value.

Shape letters: R rows, C columns.

FP8 is E4M3 (4 bits of exponent, 3 of mantissa, up to 448) or E5M2 (up to 57,344), arXiv 2209.05433.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Transposes have a multiple of this many columns: FP8 products sum over multiples of 16.
COLUMNS_MULTIPLE = 16


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The target of a cast: torch.float8_e4m3fn or torch.float8_e5m2 under a unit.

    The unit is a power of two, so that dividing by it rounds nothing. `maximum` is raised in place
    to the largest finite |value|; None records nothing. Both are float32 scalars on the device.
    """

    dtype: torch.dtype
    unit: Tensor
    maximum: Tensor | None

    @property
    def limit(self) -> float:
        """The largest value of the type."""
        return torch.finfo(self.dtype).max


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix:
    """[R, C] in FP8, its unit, and the transpose if requested.

    A product of FP8 matrices needs the summed dimension to be contiguous in both, so a matrix that
    is summed over its rows (in backward) is needed in both layouts.
    """

    unit: Tensor  # float32 scalar
    rows: Tensor  # [R, C]
    transposed: Tensor | None  # [C, R rounded up to a multiple of 16], zeros behind R


def reference(parts: Sequence[Tensor], dim: int, target: Target, *, transpose: bool) -> Fp8Matrix:
    """The parts as one matrix in FP8: the nearest multiples of the unit that the type has.

    Values beyond the type's range saturate, so that a sudden jump stays finite; NaN and infinities
    become NaN, so that they are not hidden.

    Args:
        parts: matrices [R, C] of a floating dtype, laid end to end (`dim` 0) or side by side (1).
        target: see Target.
        transpose: whether to make the transposed copy.
    """
    values = (parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)).float()
    is_finite = values.isfinite()
    if target.maximum is not None:
        largest = values.abs().masked_fill_(~is_finite, 0.0).amax()
        target.maximum.copy_(torch.maximum(target.maximum, largest))
    scaled = (values / target.unit).clamp_(-target.limit, target.limit)
    rows = scaled.masked_fill_(~is_finite, float("nan")).to(target.dtype)
    return Fp8Matrix(target.unit, rows, _transposed(rows) if transpose else None)


def _transposed(rows: Tensor) -> Tensor:
    num_rows, num_columns = rows.shape
    transposed = rows.new_zeros(num_columns, padded(num_rows))
    transposed[:, :num_rows] = rows.t()
    return transposed


def padded(num_rows: int) -> int:
    """Columns of a transpose of `num_rows` rows."""
    return -(-num_rows // COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE
