"""Common parts of Triton kernels: of the blocks', and after them of attention's.

Blocks: a row of channels is a [groups, 8] tensor, so that one byte of keep bits goes with each
group. Rows are summed in a fixed order.

Attention: tiles of a sequence's rows, rotations, windows, keep bits. R queries, N heads, H head
size. A span is the rows of a program's sequence: the number of the first, and their count. Places
count from a span's first row. A program's second number is its head, its third its sequence. The
turns of rows are their positions (None: their places), and the tables of cosines and sines (None:
no turn).
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
# A score that is not visible. It is finite because a query may see nothing in its first blocks; the
# first visible score shrinks to zero what these add. It is a power of two so that a multiple of it
# is exact, and the maximum of such a block less itself is zero.
HIDDEN: tl.constexpr = tl.constexpr(-(2.0**100))
FAR: tl.constexpr = tl.constexpr(2**30)  # a place behind every sequence
SEARCHED: tl.constexpr = tl.constexpr(1024)  # positions of queries that are searched at once


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


@kernel
def span(bounds: tl.tensor) -> Any:
    """Rows of the program's sequence: number of the first (int64), and their count."""
    first = tl.load(bounds + tl.program_id(2))
    return first.to(tl.int64), tl.load(bounds + tl.program_id(2) + 1) - first


@kernel
def load_tile(
    x: tl.tensor,
    stride: tl.tensor,
    rows: tl.tuple,
    first: tl.tensor,
    size: tl.constexpr,
    head_size: tl.constexpr,
) -> Any:
    """`x` [.., N, H] at places `first` .. of the span `rows`: [size, H]; zeros past its end."""
    at, is_real = _of_tile(x, stride, rows, first, size, head_size, head_size)
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
    """Write `x` [.., N, H] at places `first` .. of the span `rows`."""
    at, is_real = _of_tile(x, stride, rows, first, size, head_size, head_size)
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
    """`load_tile` with each row rotated by its turn, in float32: [size, H]."""
    half: tl.constexpr = head_size // 2
    cosine, sine = _turns(turns, rows, first, size, half)
    at, is_real = _of_tile(x, stride, rows, first, size, head_size, half)
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
    """`store_tile` of the gradient of what `load_rotated` loaded: rotated back."""
    if turns[1] is None:
        store_tile(x, stride, rows, first, values, size, head_size)
    else:
        half: tl.constexpr = head_size // 2
        cosine, sine = _turns(turns, rows, first, size, half)
        at, is_real = _of_tile(x, stride, rows, first, size, head_size, half)
        halves = tl.permute(tl.reshape(values, (size, 2, half)), (0, 2, 1))
        one, other = tl.split(halves)
        dtype: tl.constexpr = x.dtype.element_ty
        tl.store(at, (one * cosine + other * sine).to(dtype), mask=is_real)
        tl.store(at + half, (other * cosine - one * sine).to(dtype), mask=is_real)


@kernel
def _turns(
    turns: tl.tuple, rows: tl.tuple, first: tl.tensor, size: tl.constexpr, half: tl.constexpr
) -> Any:
    """Cosines and sines [size, H / 2] at places `first` .. of the span `rows`."""
    positions, cos, sin = turns
    place = tl.arange(0, size)
    is_real = (place < rows[1] - first)[:, None]
    channel = tl.arange(0, half)[None, :]
    if positions is None:
        cos, sin = cos + first * half, sin + first * half
        at = place[:, None] * half + channel
    else:
        at = positions_of(positions, rows, first, size)[0][:, None] * half + channel
    cosine = tl.load(cos + at, mask=is_real, other=0.0)
    return cosine, tl.load(sin + at, mask=is_real, other=0.0)


@kernel
def positions_of(positions: tl.tensor, rows: tl.tuple, first: tl.tensor, size: tl.constexpr) -> Any:
    """Positions int32 [size] of places `first` .. of the span `rows`, and the first and last."""
    place = tl.arange(0, size)
    last = tl.minimum(first + size, rows[1]) - 1
    if positions is None:
        position, ends = first + place, (first, last)
    else:
        own = positions + rows[0]
        position = tl.load(own + first + place, mask=place < rows[1] - first, other=0).to(tl.int32)
        ends = (tl.load(own + first).to(tl.int32), tl.load(own + last).to(tl.int32))
    return position, ends


@kernel
def in_reach(positions: tl.tensor, rows: tl.tuple, lowest: tl.tensor, end: tl.tensor) -> Any:
    """Places of the span `rows` whose positions, which ascend, are `lowest` .. `end` - 1."""
    before, until = tl.maximum(lowest, 0), tl.minimum(end, rows[1])
    if positions is not None:
        place = tl.arange(0, SEARCHED)
        before, until = rows[1] * 0, rows[1] * 0
        for start in range(0, rows[1], SEARCHED):
            is_real = place < rows[1] - start
            position = tl.load(positions + rows[0] + start + place, mask=is_real, other=FAR)
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
    """Scores of queries at `position` and keys `start` ..; HIDDEN where the reach ends.

    `ends` are the first and last position. `in_columns`: scores are [keys, queries].
    """
    end = start + size
    if (ends[1] - start > reach) | (end - 1 - ends[0] > reach) | (end > keys[1]):
        key = tl.arange(0, size)
        key = tl.where(key < keys[1] - start, key, FAR)
        place = position - start + reach
        # From 0 to twice the reach where it is visible; one comparison, as it has no sign.
        apart = place[None, :] - key[:, None] if in_columns else place[:, None] - key[None, :]
        scores = tl.where(apart.to(tl.uint32, bitcast=True) <= 2 * reach, scores, HIDDEN)
    return scores


@kernel
def _of_tile(
    x: tl.tensor,
    stride: tl.tensor,
    rows: tl.tuple,
    first: tl.tensor,
    size: tl.constexpr,
    head_size: tl.constexpr,
    channels: tl.constexpr,
) -> Any:
    """Addresses of a head's first `channels` at each place, and which places are real."""
    place = tl.arange(0, size)
    start = x + (rows[0] + first) * stride + tl.program_id(1) * head_size
    # Constant in a loop over `first`, so it stays in registers.
    within = place[:, None] * stride + tl.arange(0, channels)[None, :]
    return start + within, (place < rows[1] - first)[:, None]


@kernel
def row_numbers(num_rows: tl.tensor, rows: tl.tuple, place: tl.tensor) -> Any:
    """Indices into [N, num_rows] of the places of the span `rows`, int64."""
    return tl.program_id(1).to(tl.int64) * num_rows + rows[0] + place


@kernel
def load_pairs(
    x: tl.tensor, stride: tl.tensor, rows: tl.tuple, first: tl.tensor, size: tl.constexpr
) -> Any:
    """Two neighbours at `x` of each place `first` .. of the span `rows`: two of [size].

    One load reads both: in Triton 3.6 a vector shorter than a program's threads makes every thread
    copy what it needs, which is sixteen times as much.
    """
    place = tl.arange(0, size)
    at = (place * stride)[:, None] + tl.arange(0, 2)[None, :]
    is_real = (place < rows[1] - first)[:, None]
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
    """Keep bits of 64 keys for each place `first` .. of the span `queries`: two int32 [size]."""
    stride = tl.num_programs(1) * num_words
    of_head = keep + tl.program_id(1) * num_words + first_key // 32
    return load_pairs(of_head, stride, queries, first, size)


@kernel
def kept_in_rows(words: tl.tuple, key: tl.tensor) -> Any:
    """Bool [size, 64] of `load_keep`; `key` is 0 .. 63.

    In a product's result, lanes of a warp differ in bits 1 and 2 of a column's number. These are
    shifted out once for all columns; the remaining shifts are constants.
    """
    halves = tl.where((key < 32)[None, :], words[0][:, None], words[1][:, None])
    return ((halves >> (key & 6)[None, :]) & (1 << (key & 25))[None, :]) != 0


@kernel
def kept_in_columns(words: tl.tuple, key: tl.tensor) -> Any:
    """Bool [64, size] of `load_keep`; a thread's two rows differ in bit 3 of their number."""
    halves = tl.where((key < 32)[:, None], words[0][None, :], words[1][None, :])
    return ((halves >> (key & 23)[:, None]) & (1 << (key & 8))[:, None]) != 0
