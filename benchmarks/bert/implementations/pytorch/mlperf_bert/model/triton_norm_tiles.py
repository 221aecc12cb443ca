"""What kernels over several whole rows at a time share: the sum under a LayerNorm, its gradient.

A tile is [rows, columns], at some rows and from column 0 on; `inside` says where it has elements.
"""

from typing import Any

import triton.language as tl

from mlperf_bert.model.triton_parts import kernel


@kernel
def norm_gradient_of_tile(
    given: tl.tensor,
    total: tl.tensor,
    weights: tl.tensor,
    statistics: tl.tensor,
    row: tl.tensor,
    num_rows: int,
    inside: tl.tensor,
    size: tl.constexpr,
) -> Any:
    """Normalised rows, and the gradient of what was normalised from that of the LayerNorm."""
    mean = tl.load(statistics + row, mask=row < num_rows, other=0.0)[:, None]
    inverse = tl.load(statistics + num_rows + row, mask=row < num_rows, other=0.0)[:, None]
    normalised = tl.where(inside, (total - mean) * inverse, 0.0)
    scaled = given * weights
    along_ones = (tl.sum(scaled, 1) / size)[:, None]
    along_normalised = (tl.sum(scaled * normalised, 1) / size)[:, None]
    slope = (scaled - along_ones - normalised * along_normalised) * inverse
    return normalised, tl.where(inside, slope, 0.0)


@kernel
def sum_of_tile(
    product: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    keep: tl.tensor,
    row: tl.tensor,
    num_rows: int,
    column: tl.tensor,
    inside: tl.tensor,
    size: tl.constexpr,
    scale: tl.constexpr,
    has_keep: tl.constexpr,
) -> Any:
    """dropout(product + bias) + residual in float32, zero where a tile is not `inside`."""
    at = row[:, None] * size + column[None, :]
    values = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(bias + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    if has_keep:
        values = drop_tile(values, keep, row, num_rows, size, scale)
    values += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, values, 0.0)


@kernel
def drop_tile(
    values: tl.tensor,
    keep: tl.tensor,
    row: tl.tensor,
    num_rows: int,
    size: tl.constexpr,
    scale: tl.constexpr,
) -> Any:
    """`values` dropped and scaled by the keep bits of their rows; `column` starts at 0."""
    num_bytes: tl.constexpr = (size + 7) // 8
    columns: tl.constexpr = values.shape[1]
    byte = tl.arange(0, columns // 8)  # each byte is loaded once
    mask = (row < num_rows)[:, None] & (byte < num_bytes)[None, :]
    bits = tl.load(keep + row[:, None] * num_bytes + byte[None, :], mask=mask, other=0)
    each = (bits[:, :, None] >> tl.arange(0, 8)[None, None, :].to(tl.uint8)) & 1
    kept = tl.reshape(each, (values.shape[0], columns)) != 0
    return tl.where(kept, values * scale, 0.0)
