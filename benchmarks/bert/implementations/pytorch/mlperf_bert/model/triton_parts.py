"""Common parts of the blocks' Triton kernels: rows in groups of eight channels, sums over rows.

A row of channels is a [groups, 8] tensor, so that one byte of keep bits goes with each group.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# All run at once: six of a norm's backward fit on each of an A100's 108 multiprocessors, five on
# each of an H100's 132 (`tests/unit/model/test_kernel_gate.py` checks the registers for that).
MOST_PROGRAMS = 648
SUMMED_ROWS, SUMMED_COLUMNS = 64, 32  # partial sums that a program adds at a time


def kernel(function: Callable[..., None]) -> Any:
    """A Triton kernel, or a function that kernels call.

    Machine code does not depend on the number of rows: batches of any size run the code compiled
    for the first.
    """
    return triton.jit(function, do_not_specialize=("rows", "num_rows"))


def computed_in(*tensors: Tensor) -> Any:
    """Triton's float64 if one of the tensors is float64, else float32."""
    return tl.float64 if any(each.dtype == torch.float64 for each in tensors) else tl.float32


def empty_sums(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised sums on the device of `like`: float64 if `like` is float64, else float32."""
    precise = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(shape, dtype=precise, device=like.device)


def num_groups(channels: int) -> int:
    """Groups of eight that hold `channels`, rounded up to a power of two."""
    groups: int = triton.next_power_of_2(triton.cdiv(channels, 8))
    return groups


def num_warps(groups: int) -> int:
    """Warps of a program that works on one row: eight channels, 16 bytes in bf16, per thread."""
    return min(max(groups // 32, 1), 16)


def num_programs(rows: int) -> int:
    """Number of programs that share rows to be summed: at most MOST_PROGRAMS, on every GPU.

    So the order of the sums does not depend on the GPU. Each has at least four rows, or it would
    write more sums than it reads.
    """
    return min(-(-rows // 4), MOST_PROGRAMS)


def num_row_blocks(rows: int, block_rows: int, most: int) -> int:
    """Number of programs that share blocks of rows: at most `most`, four blocks or more each."""
    return min(-(-rows // (4 * block_rows)), max(most, 1))


def sum_programs(partials: Tensor, dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, ...]:
    """Sum over dimension 0 of [programs, K, C]: K tensors [C], each of its own dtype.

    The order of the sum is fixed, so it repeats bit by bit.
    """
    programs, count, channels = partials.shape
    widest = reduce(torch.promote_types, dtypes)
    sums = torch.empty((count, channels), dtype=widest, device=partials.device)
    columns = count * channels
    _sum_rows[(triton.cdiv(columns, SUMMED_COLUMNS),)](
        *(partials, sums, programs, columns, computed_in(partials), SUMMED_ROWS, SUMMED_COLUMNS)
    )
    return tuple(each.to(dtype) for each, dtype in zip(sums.unbind(), dtypes, strict=True))


@kernel
def channels_of(groups: tl.constexpr) -> Any:
    """Numbers [groups, 8] of a row's channels."""
    return tl.arange(0, groups)[:, None] * 8 + tl.arange(0, 8)[None, :]


@kernel
def load_channels(
    pointer: tl.tensor, channels: tl.tensor, size: tl.constexpr, dtype: tl.constexpr
) -> Any:
    """Values at the given channels of a row that begins at `pointer`; zero past its end."""
    return tl.load(pointer + channels, mask=channels < size, other=0.0).to(dtype)


@kernel
def store_channels(
    pointer: tl.tensor, channels: tl.tensor, values: tl.tensor, size: tl.constexpr
) -> None:
    """Write those values of a row that lie before its end, rounded to the dtype written to."""
    tl.store(pointer + channels, values.to(pointer.dtype.element_ty), mask=channels < size)


@kernel
def drop(
    values: tl.tensor,
    keep: tl.tensor,
    row: tl.tensor,
    size: tl.constexpr,
    scale: tl.constexpr,
    groups: tl.constexpr,
) -> Any:
    """`values` [groups, 8] of a row, dropped and scaled by its keep bits."""
    num_bytes: tl.constexpr = (size + 7) // 8
    group = tl.arange(0, groups)
    kept = tl.load(keep + row * num_bytes + group, mask=group < num_bytes, other=0)
    bits = (kept.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1
    return tl.where(bits == 1, values * scale, 0.0)


@kernel
def _sum_rows(
    values: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    dtype: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)[None, :]
    total = tl.zeros((block_rows, block_columns), dtype)
    first = 0
    while first < rows:  # not `range`: with numpy 2.4, older interpreters cannot take it
        row = first + tl.arange(0, block_rows)[:, None]
        is_there = (row < rows) & (column < columns)
        total += tl.load(values + row * columns + column, mask=is_there, other=0.0)
        first += block_rows
    own = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    tl.store(sums + own, tl.sum(total, 0).to(sums.dtype.element_ty), mask=own < columns)
