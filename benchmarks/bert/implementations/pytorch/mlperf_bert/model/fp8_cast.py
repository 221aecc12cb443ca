"""Readable casts to FP8, which divide by a unit, saturate, transpose and record the maximum.

Shapes use the letters R (rows) and C (columns).

There are two FP8 formats (arXiv 2209.05433). E4M3 has 4 exponent bits and 3 mantissa bits. Its
largest value is 448. E5M2 has 5 exponent bits and 2 mantissa bits. Its largest value is 57,344.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The columns of a transpose are padded to a multiple of 16, because FP8 products need the summed
# dimension to be such a multiple.
COLUMNS_MULTIPLE = 16


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The FP8 dtype and the unit of a cast, and the maximum that the cast updates.

    `dtype` is torch.float8_e4m3fn or torch.float8_e5m2. `unit` is a power of two, so that dividing
    by it is exact. A cast sets `maximum` in place to the larger of `maximum` and the matrix's
    largest finite |value|, unless `maximum` is None. `unit` and `maximum` are float32 scalars on
    the device.
    """

    dtype: torch.dtype
    unit: Tensor
    maximum: Tensor | None

    @property
    def limit(self) -> float:
        """The largest finite value of the FP8 dtype."""
        return torch.finfo(self.dtype).max


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix:
    """A matrix [R, C] in FP8 with its unit, and with its transpose if one was requested.

    A product of FP8 matrices needs the summed dimension to be contiguous in both factors. If the
    backward pass sums over the rows of a matrix, the matrix is therefore needed in both layouts.
    """

    unit: Tensor  # float32 scalar
    rows: Tensor  # [R, C]
    transposed: Tensor | None  # [C, R rounded up to a multiple of 16], zeros after R


def reference(parts: Sequence[Tensor], dim: int, target: Target, *, transpose: bool) -> Fp8Matrix:
    """Join matrices into one, divide it by the target's unit, and round the result to FP8.

    Values beyond the range of the FP8 dtype saturate, so that they stay finite if they suddenly
    grow. NaN and infinities become NaN, so that they are not hidden.

    Args:
        parts: matrices [R, C] of a floating dtype.
        dim: dimension along which the parts are concatenated, 0 or 1.
        target: the dtype and unit, and the maximum to update.
        transpose: whether to create the transposed copy.
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
    """Return `num_rows` rounded up to a multiple of 16, the column count of an FP8 transpose."""
    return -(-num_rows // COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE
