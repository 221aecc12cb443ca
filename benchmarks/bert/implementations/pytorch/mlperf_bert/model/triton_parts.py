"""Shared parts of Triton kernels, first those of the fused blocks, then those of attention.

In the kernels of the fused blocks, a row of channels is a [groups, 8] tensor, so that each group
has one byte of keep bits. Rows are summed in a fixed order.

The parts for attention handle tiles of a sequence's rows, rotations, windows and keep bits. Their
shapes use the letters R (queries), N (heads) and H (head size). A span describes the rows of a
program's sequence by the number of the first row and their count. An offset counts rows from the
first row of a span. A program's first program ID is the number of its head, and its second is the
number of its block of rows. The argument `turns` describes the rotation of rows. It contains the
rows' positions (None if they equal the offsets) and the tables of cosines and sines (None if rows
are not rotated).
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# With this limit all programs run at once. Six programs of a norm's backward pass fit on each of an
# A100's 108 multiprocessors, and five on each of an H100's 132.
# `tests/unit/model/test_kernel_gate.py` checks that these programs use few enough registers.
MOST_PROGRAMS = 648
SUMMED_ROWS, SUMMED_COLUMNS = 64, 32  # partial sums that a program adds at a time
# The score of a key that is not visible. It is finite because a query may see nothing in its first
# blocks. The first visible score then scales what these blocks have added down to zero. It is a
# power of two so that multiples of it are exact, and subtracting the maximum of such a block from
# itself gives zero.
HIDDEN: tl.constexpr = tl.constexpr(-(2.0**100))
FAR: tl.constexpr = tl.constexpr(2**30)  # a position past the end of every sequence
SEARCHED: tl.constexpr = tl.constexpr(1024)  # positions of queries that are searched at once


def kernel(function: Callable[..., None]) -> Any:
    """Declare a function as a Triton kernel, or as a function that kernels call.

    Machine code is not specialized for the number of rows, so that batches of any size run the code
    that was compiled for the first batch.
    """
    return triton.jit(function, do_not_specialize=("rows", "num_rows"))


def computed_in(*tensors: Tensor) -> Any:
    """Return the Triton dtype in which kernels compute with `tensors`.

    It is float64 if any of the tensors is float64, and float32 otherwise.
    """
    return tl.float64 if any(each.dtype == torch.float64 for each in tensors) else tl.float32


def empty_sums(like: Tensor, *shape: int) -> Tensor:
    """Allocate a tensor for sums, in float64 if `like` is float64, and in float32 otherwise."""
    precise = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(shape, dtype=precise, device=like.device)


def num_groups(channels: int) -> int:
    """Return the number of groups of eight for `channels`, rounded up to a power of two."""
    groups: int = triton.next_power_of_2(triton.cdiv(channels, 8))
    return groups


def num_warps(groups: int) -> int:
    """Return the number of warps for a program that processes a row of 8 * `groups` channels.

    Each thread has eight channels, which are 16 bytes in bf16.
    """
    return min(max(groups // 32, 1), 16)


def num_programs(rows: int) -> int:
    """Return the number of programs among which a sum over rows is split.

    The number is at most MOST_PROGRAMS on every GPU, so that the order of the sums does not depend
    on the GPU. Each program has at least four rows, because with fewer it would write more than it
    reads.
    """
    return min(-(-rows // 4), MOST_PROGRAMS)


def num_row_blocks(rows: int, block_rows: int, most: int) -> int:
    """Return the number of programs among which blocks of `block_rows` rows are split.

    The number is at most `most`, and each program has four blocks or more.
    """
    return min(-(-rows // (4 * block_rows)), max(most, 1))


def sum_programs(partials: Tensor, dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, ...]:
    """Sum the programs' partial sums [programs, K, C] over the programs.

    Returns K tensors [C], each in its own dtype. The order of the sum is fixed, so the result is
    reproducible bit for bit.
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
    """Return the numbers [groups, 8] of a row's channels."""
    return tl.arange(0, groups)[:, None] * 8 + tl.arange(0, 8)[None, :]


@kernel
def load_channels(
    pointer: tl.tensor, channels: tl.tensor, size: tl.constexpr, dtype: tl.constexpr
) -> Any:
    """Load the given channels of a row that starts at `pointer`, with zeros past its end."""
    return tl.load(pointer + channels, mask=channels < size, other=0.0).to(dtype)


@kernel
def store_channels(
    pointer: tl.tensor, channels: tl.tensor, values: tl.tensor, size: tl.constexpr
) -> None:
    """Write the values of a row up to its end, rounded to the dtype of the destination."""
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
    """Apply dropout to a row's `values` [groups, 8] by its keep bits, and scale the kept values."""
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
    while first < rows:  # with numpy 2.4, older Triton interpreters reject `range` here
        row = first + tl.arange(0, block_rows)[:, None]
        is_there = (row < rows) & (column < columns)
        total += tl.load(values + row * columns + column, mask=is_there, other=0.0)
        first += block_rows
    own = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    tl.store(sums + own, tl.sum(total, 0).to(sums.dtype.element_ty), mask=own < columns)


@kernel
def block_of(blocks: tl.tensor, bounds: tl.tensor, size: tl.constexpr) -> Any:
    """Return the sequence and the offset of the program's block, from `AttentionLayout.blocks`."""
    sequence = tl.load(blocks + tl.program_id(1))
    first = tl.load(bounds + sequence) // size + sequence
    return sequence, (tl.program_id(1) - first) * size


@kernel
def span(bounds: tl.tensor, sequence: tl.tensor) -> Any:
    """Return the span of a sequence (first row as int64, and number of rows)."""
    first = tl.load(bounds + sequence)
    return first.to(tl.int64), tl.load(bounds + sequence + 1) - first


@kernel
def load_tile(
    x: tl.tensor,
    stride: tl.tensor,
    rows: tl.tuple,
    first: tl.tensor,
    size: tl.constexpr,
    head_size: tl.constexpr,
) -> Any:
    """Load a tile [size, H] of `x` [.., N, H] at the offset `first`, with zeros past the span."""
    at, is_real = _tile_addresses(x, stride, rows, first, size, head_size, head_size)
    return tl.load(at, mask=is_real, other=0.0)


@kernel
def store_tile(
    x: tl.tensor,
    stride: tl.tensor,
    rows: tl.tuple,
    first: tl.tensor,
    values: tl.tensor,
    size: tl.constexpr,
    head_size: tl.constexpr,
) -> None:
    """Write the `values` of a tile of `x` [.., N, H] at the offset `first` of the span `rows`."""
    at, is_real = _tile_addresses(x, stride, rows, first, size, head_size, head_size)
    tl.store(at, values.to(x.dtype.element_ty), mask=is_real)


@kernel
def load_rotated(
    x: tl.tensor,
    stride: tl.tensor,
    rows: tl.tuple,
    first: tl.tensor,
    turns: tl.tuple,
    size: tl.constexpr,
    head_size: tl.constexpr,
) -> Any:
    """Load a tile [size, H] like `load_tile`, and rotate each row in float32."""
    half: tl.constexpr = head_size // 2
    cosine, sine = _turns(turns, rows, first, size, half)
    at, is_real = _tile_addresses(x, stride, rows, first, size, head_size, half)
    one = tl.load(at, mask=is_real, other=0.0).to(tl.float32)
    other = tl.load(at + half, mask=is_real, other=0.0).to(tl.float32)
    rotated = tl.join(one * cosine - other * sine, other * cosine + one * sine)
    return tl.reshape(tl.permute(rotated, (0, 2, 1)), (size, head_size))


@kernel
def store_rotated(
    x: tl.tensor,
    stride: tl.tensor,
    rows: tl.tuple,
    first: tl.tensor,
    turns: tl.tuple,
    values: tl.tensor,
    size: tl.constexpr,
    head_size: tl.constexpr,
) -> None:
    """Rotate the gradients of rotated rows back, and store them like `store_tile`."""
    if turns[1] is None:
        store_tile(x, stride, rows, first, values, size, head_size)
    else:
        half: tl.constexpr = head_size // 2
        cosine, sine = _turns(turns, rows, first, size, half)
        at, is_real = _tile_addresses(x, stride, rows, first, size, head_size, half)
        halves = tl.permute(tl.reshape(values, (size, 2, half)), (0, 2, 1))
        one, other = tl.split(halves)
        dtype: tl.constexpr = x.dtype.element_ty
        tl.store(at, (one * cosine + other * sine).to(dtype), mask=is_real)
        tl.store(at + half, (other * cosine - one * sine).to(dtype), mask=is_real)


@kernel
def _turns(
    turns: tl.tuple, rows: tl.tuple, first: tl.tensor, size: tl.constexpr, half: tl.constexpr
) -> Any:
    """Load the cosines and sines [size, H / 2] of a tile at the offset `first` of a span."""
    positions, cos, sin = turns
    offset = tl.arange(0, size)
    is_real = (offset < rows[1] - first)[:, None]
    channel = tl.arange(0, half)[None, :]
    if positions is None:
        cos, sin = cos + first * half, sin + first * half
        at = offset[:, None] * half + channel
    else:
        at = positions_of(positions, rows, first, size)[0][:, None] * half + channel
    cosine = tl.load(cos + at, mask=is_real, other=0.0)
    return cosine, tl.load(sin + at, mask=is_real, other=0.0)


@kernel
def positions_of(positions: tl.tensor, rows: tl.tuple, first: tl.tensor, size: tl.constexpr) -> Any:
    """Return the positions of a tile that starts at the offset `first` of a span, int32 [size].

    Also returns the first and the last of these positions.
    """
    offset = tl.arange(0, size)
    last = tl.minimum(first + size, rows[1]) - 1
    if positions is None:
        position, ends = first + offset, (first, last)
    else:
        own = positions + rows[0]
        position = tl.load(own + first + offset, mask=offset < rows[1] - first, other=0).to(
            tl.int32
        )
        ends = (tl.load(own + first).to(tl.int32), tl.load(own + last).to(tl.int32))
    return position, ends


@kernel
def in_reach(positions: tl.tensor, rows: tl.tuple, lowest: tl.tensor, end: tl.tensor) -> Any:
    """Find the range of offsets of a span whose ascending positions are `lowest` .. `end` - 1."""
    before, until = tl.maximum(lowest, 0), tl.minimum(end, rows[1])
    if positions is not None:
        offset = tl.arange(0, SEARCHED)
        before, until = rows[1] * 0, rows[1] * 0
        for start in range(0, rows[1], SEARCHED):
            is_real = offset < rows[1] - start
            position = tl.load(positions + rows[0] + start + offset, mask=is_real, other=FAR)
            before += tl.sum((position < lowest).to(tl.int32))
            until += tl.sum((position < end).to(tl.int32))
    return before, until


@kernel
def hide(
    scores: tl.tensor,
    position: tl.tensor,
    ends: tl.tuple,
    keys: tl.tuple,
    start: tl.tensor,
    reach: tl.constexpr,
    size: tl.constexpr,
    in_columns: tl.constexpr,
) -> Any:
    """Set the scores of keys outside the reach of their query to HIDDEN.

    Queries are at `position`, and the block's first key is `start`. `ends` contains the first and
    last position. If `in_columns` is set, scores are [keys, queries].
    """
    end = start + size
    if (ends[1] - start > reach) | (end - 1 - ends[0] > reach) | (end > keys[1]):
        key = tl.arange(0, size)
        key = tl.where(key < keys[1] - start, key, FAR)
        last = position - start + reach
        # The distance is between 0 and twice the reach if the key is visible. As an unsigned
        # integer it needs only one comparison.
        distance = last[None, :] - key[:, None] if in_columns else last[:, None] - key[None, :]
        scores = tl.where(distance.to(tl.uint32, bitcast=True) <= 2 * reach, scores, HIDDEN)
    return scores


@kernel
def _tile_addresses(
    x: tl.tensor,
    stride: tl.tensor,
    rows: tl.tuple,
    first: tl.tensor,
    size: tl.constexpr,
    head_size: tl.constexpr,
    channels: tl.constexpr,
) -> Any:
    """Return the addresses of `channels` channels in each row of a tile, and its real rows."""
    offset = tl.arange(0, size)
    start = x + (rows[0] + first) * stride + tl.program_id(0) * head_size
    # This part does not change in a loop over `first`, so it stays in registers.
    within = offset[:, None] * stride + tl.arange(0, channels)[None, :]
    return start + within, (offset < rows[1] - first)[:, None]


@kernel
def row_numbers(num_rows: tl.tensor, rows: tl.tuple, offset: tl.tensor) -> Any:
    """Return int64 indices into [N, num_rows] of rows at these offsets of the span `rows`."""
    return tl.program_id(0).to(tl.int64) * num_rows + rows[0] + offset


@kernel
def load_pairs(
    x: tl.tensor, stride: tl.tensor, rows: tl.tuple, first: tl.tensor, size: tl.constexpr
) -> Any:
    """Load two adjacent values per row at the offset `first` of a span, as two vectors [size].

    A single load reads both values. In Triton 3.6, if a vector is shorter than a program's number
    of threads, every thread copies what it needs, which is sixteen times as much.
    """
    offset = tl.arange(0, size)
    at = (offset * stride)[:, None] + tl.arange(0, 2)[None, :]
    is_real = (offset < rows[1] - first)[:, None]
    pairs = tl.load(x + (rows[0] + first) * stride + at, mask=is_real, other=0)
    return tl.split(pairs)


@kernel
def load_keep(
    keep: tl.tensor,
    num_words: tl.tensor,
    queries: tl.tuple,
    first: tl.tensor,
    size: tl.constexpr,
    first_key: tl.tensor,
) -> Any:
    """Load the keep bits of 64 keys for each query at the offset `first`, as two int32 [size]."""
    stride = tl.num_programs(0) * num_words
    head_words = keep + tl.program_id(0) * num_words + first_key // 32
    return load_pairs(head_words, stride, queries, first, size)


@kernel
def kept_in_rows(words: tl.tuple, key: tl.tensor) -> Any:
    """Expand the words of `load_keep` to bool [size, 64], where `key` is 0 .. 63.

    In a product's result, lanes of a warp differ in bits 1 and 2 of a column's number. The words
    are shifted by these bits once for all columns, so that the remaining shifts are constants.
    """
    halves = tl.where((key < 32)[None, :], words[0][:, None], words[1][:, None])
    return ((halves >> (key & 6)[None, :]) & (1 << (key & 25))[None, :]) != 0


@kernel
def kept_in_columns(words: tl.tuple, key: tl.tensor) -> Any:
    """Expand the words of `load_keep` to bool [64, size].

    The shifts are split at bit 3, because the numbers of a thread's two rows differ in that bit.
    """
    halves = tl.where((key < 32)[:, None], words[0][None, :], words[1][None, :])
    return ((halves >> (key & 23)[:, None]) & (1 << (key & 8))[:, None]) != 0
