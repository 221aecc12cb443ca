"""Cross-entropy kernels for a GPU, which read the logits once in each forward and backward pass.

The backward pass overwrites the logits with their gradient and sums its columns at the same time,
so that the gradient of the preceding product's bias needs no separate pass. All computation is in
float32, or in float64 for float64 logits. Only the gradient of the logits is rounded.

Shapes use the letters P (positions) and V (classes).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlperf_bert.data.batch import IGNORED
from mlperf_bert.model.triton_parts import (
    channels_of,
    computed_in,
    empty_sums,
    kernel,
    num_row_blocks,
    sum_programs,
)

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
LOWEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).min)
GROUPS = 512  # groups of eight classes that a program of the forward pass reads at a time
BLOCK_ROWS, BLOCK_COLUMNS = 2, 1024  # tile of the backward pass
# The upper limit on programs of the backward pass is the same on every GPU, so that sums have the
# same order everywhere. All programs run at once if eight fit on each of an A100's 108
# multiprocessors.
MOST_PROGRAMS = 840


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of each row, and statistics for the backward pass.

    Args:
        logits: [P, V], contiguous.
        labels: int64 [P]. If a row's label is IGNORED, its loss is zero, whatever the row contains.
            If the label is not a class, the loss is NaN.

    Returns:
        Losses in nats [P], and statistics [2, P], which are the largest logit of each row and the
        inverse of the sum of exp(logit - largest).
    """
    rows, columns = logits.shape
    losses, statistics = empty_sums(logits, rows), empty_sums(logits, 2, rows)
    groups = min(GROUPS, triton.next_power_of_2(triton.cdiv(columns, 8)))
    _cross_entropy_forward[(rows,)](
        (logits, labels, losses, statistics), rows, columns, IGNORED, computed_in(logits), groups
    )
    return losses, statistics


def cross_entropy_backward(
    gradient: Tensor, logits: Tensor, labels: Tensor, statistics: Tensor, bias_dtype: torch.dtype
) -> Tensor:
    """Overwrite the logits with their gradient, and return the gradient's sum over the positions.

    `gradient` is the scalar gradient of the summed loss. Rows whose label is IGNORED become zero.

    Returns:
        The sum, [V] in `bias_dtype`. It is rounded only at the end.
    """
    rows, columns = logits.shape
    column_blocks = triton.cdiv(columns, BLOCK_COLUMNS)
    programs = num_row_blocks(rows, BLOCK_ROWS, MOST_PROGRAMS // column_blocks)
    partials = empty_sums(statistics, programs, 1, columns)
    _cross_entropy_backward[(programs, column_blocks)](
        *((gradient, logits, labels, statistics, partials), rows, columns, IGNORED),
        *(computed_in(logits), BLOCK_ROWS, BLOCK_COLUMNS),
    )
    return sum_programs(partials, (bias_dtype,))[0]


@kernel
def _cross_entropy_forward(
    tensors: tl.tuple,
    rows: tl.tensor,
    columns: tl.constexpr,
    ignored: tl.constexpr,
    dtype: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    logits, labels, losses, statistics = tensors
    row = tl.program_id(0).to(tl.int64)
    own_row = logits + row * columns
    label = tl.load(labels + row)
    is_used = label != ignored
    channels = channels_of(groups)
    # Each group of eight has its own maximum, because with a common maximum the threads would have
    # to wait for each other in every iteration.
    largest = tl.full((groups,), LOWEST, dtype)
    total = tl.zeros((groups,), dtype)
    first, end = 0, tl.where(is_used, columns, 0)
    while first < end:
        column = first + channels
        values = tl.load(own_row + column, mask=column < columns, other=-float("inf")).to(dtype)
        before, largest = largest, tl.maximum(largest, tl.max(values, 1))
        total *= tl.exp2((before - largest) * LOG2_E)
        total += tl.sum(tl.exp2((values - largest[:, None]) * LOG2_E), 1)
        first += groups * 8
    largest_of_all = tl.where(is_used, tl.max(largest, 0), 0.0)
    sum_of_all = tl.sum(total * tl.exp2((largest - largest_of_all) * LOG2_E), 0)
    is_class = (label >= 0) & (label < columns)
    own = tl.load(own_row + label, mask=is_class, other=float("nan")).to(dtype)
    tl.store(losses + row, tl.where(is_used, tl.log(sum_of_all) - (own - largest_of_all), 0.0))
    tl.store(statistics + row, largest_of_all)
    tl.store(statistics + rows + row, tl.where(is_used, 1 / sum_of_all, 0.0))


@kernel
def _cross_entropy_backward(
    tensors: tl.tuple,
    rows: tl.tensor,
    columns: tl.constexpr,
    ignored: tl.constexpr,
    dtype: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    gradient, logits, labels, statistics, partials = tensors
    upstream = tl.load(gradient).to(dtype)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    offsets = column[None, :] - tl.arange(0, block_rows)[:, None] * columns
    total = tl.zeros((block_columns,), dtype)
    # Rows are processed from the last to the first. The GPU's cache may still contain the rows that
    # the forward pass read last, and it will contain the first rows when the products read the
    # gradient.
    left = rows - tl.program_id(0) * block_rows
    while left > 0:
        row = left - 1 - tl.arange(0, block_rows)
        label = tl.load(labels + row, mask=row >= 0, other=ignored).to(tl.int32)[:, None]
        largest = tl.load(statistics + row, mask=row >= 0, other=0.0)[:, None]
        inverse_sum = tl.load(statistics + rows + row, mask=row >= 0, other=0.0)[:, None]
        is_there = (row >= 0)[:, None] & (column < columns)[None, :]
        at = logits + (left - 1).to(tl.int64) * columns + offsets
        # Ignored rows are not read, because zero times NaN would be NaN.
        values = tl.load(at, mask=is_there & (label != ignored), other=0.0).to(dtype)
        slope = tl.exp2((values - largest) * LOG2_E) * (inverse_sum * upstream)
        slope -= tl.where(column[None, :] == label, upstream, 0.0)
        tl.store(at, slope.to(logits.dtype.element_ty), mask=is_there)
        total += tl.sum(slope, 0)
        left -= tl.num_programs(0) * block_rows
    tl.store(partials + tl.program_id(0) * columns + column, total, mask=column < columns)
