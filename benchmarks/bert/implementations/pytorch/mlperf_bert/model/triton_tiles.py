"""What the Triton kernels of attention share: tiles of one sequence and head.

Shape letters: B sequences, T tokens, R queries, N heads, H head size.

A program's second number is its head, its third its sequence. Places count from the sequence's
first row, so that only that row's address needs 64 bits.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
KEYS = 64  # of a tile: their keep bits are read at once, as two words


class Saved(NamedTuple):
    """What the forward leaves behind; heads and channels of a row lie in one piece."""

    q: Tensor  # [R, N, H]
    k: Tensor  # [T, N, H]
    v: Tensor  # [T, N, H]
    context: Tensor  # [R, N, H]
    logsumexp: Tensor  # float32 [N, R]: log2 of the sum of 2 ** (scores / ln 2) of a query
    keep: Tensor  # int32 [R, N, words]: `attention_keep_bits`; empty without dropout
    cu_queries: Tensor  # int32 [B + 1]
    cu_seqlens: Tensor  # int32 [B + 1]


class Tile(NamedTuple):
    """How many queries a program holds at once beside 64 keys, and how it is run.

    Constants, not measured at the start: sums depend on them, and so a run repeats bit by bit on
    any machine of its kind and after a restart.
    """

    queries: int
    num_warps: int
    num_stages: int  # of the loop over the others
    most_registers: int | None = None  # of a thread; the compiler's own choice where None


def _kernel(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


@_kernel
def span(bounds: tl.tensor) -> Any:
    """The rows of the program's sequence: number of the first (int64), how many."""
    first = tl.load(bounds + tl.program_id(2))
    return first.to(tl.int64), tl.load(bounds + tl.program_id(2) + 1) - first


@_kernel
def load_tile(
    x: tl.tensor,
    stride: tl.tensor,
    rows: tl.tuple,
    first: tl.tensor,
    size: tl.constexpr,
    head_size: tl.constexpr,
) -> Any:
    """`x` [.., N, H] at places `first` .. of the span `rows`: [size, H]; zeros behind its end."""
    at, is_real = _of_tile(x, stride, rows, first, size, head_size)
    return tl.load(at, mask=is_real, other=0.0)


@_kernel
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
    at, is_real = _of_tile(x, stride, rows, first, size, head_size)
    tl.store(at, values.to(x.dtype.element_ty), mask=is_real)


@_kernel
def _of_tile(
    x: tl.tensor,
    stride: tl.tensor,
    rows: tl.tuple,
    first: tl.tensor,
    size: tl.constexpr,
    head_size: tl.constexpr,
) -> Any:
    place = tl.arange(0, size)
    start = x + (rows[0] + first) * stride + tl.program_id(1) * head_size
    # The same in every pass of a loop over `first`, so it stays in registers.
    within = place[:, None] * stride + tl.arange(0, head_size)[None, :]
    return start + within, (place < rows[1] - first)[:, None]


@_kernel
def row_numbers(num_rows: tl.tensor, rows: tl.tuple, place: tl.tensor) -> Any:
    """Where in [N, num_rows] the places of the span `rows` are: int64, as many."""
    return tl.program_id(1).to(tl.int64) * num_rows + rows[0] + place


@_kernel
def load_pairs(
    x: tl.tensor, stride: tl.tensor, rows: tl.tuple, first: tl.tensor, size: tl.constexpr
) -> Any:
    """Two neighbours at `x` of each place `first` .. of the span `rows`: two of [size].

    One load of both: Triton 3.6 has every thread copy what it needs of a vector that is shorter
    than the threads of a program, which is sixteen times as much.
    """
    place = tl.arange(0, size)
    at = (place * stride)[:, None] + tl.arange(0, 2)[None, :]
    is_real = (place < rows[1] - first)[:, None]
    pairs = tl.load(x + (rows[0] + first) * stride + at, mask=is_real, other=0)
    return tl.split(pairs)


@_kernel
def load_keep(
    keep: tl.tensor,
    num_words: tl.tensor,
    queries: tl.tuple,
    first: tl.tensor,
    size: tl.constexpr,
    first_key: tl.tensor,
) -> Any:
    """Keep bits of 64 keys of each place `first` .. of the span `queries`: two int32 [size]."""
    stride = tl.num_programs(1) * num_words
    of_head = keep + tl.program_id(1) * num_words + first_key // 32
    return load_pairs(of_head, stride, queries, first, size)


@_kernel
def kept_in_rows(words: tl.tuple, key: tl.tensor) -> Any:
    """Bool [size, 64] of `load_keep`; `key` is 0 .. 63.

    Lanes of a warp differ in bits 1 and 2 of a column's number, where a tile is the result of a
    product: these are shifted out once for all columns, and what is left are constants.
    """
    halves = tl.where((key < 32)[None, :], words[0][:, None], words[1][:, None])
    return ((halves >> (key & 6)[None, :]) & (1 << (key & 25))[None, :]) != 0


@_kernel
def kept_in_columns(words: tl.tuple, key: tl.tensor) -> Any:
    """Bool [64, size] of `load_keep`; a thread's two rows differ in bit 3 of their number."""
    halves = tl.where((key < 32)[:, None], words[0][None, :], words[1][None, :])
    return ((halves >> (key & 23)[:, None]) & (1 << (key & 8))[:, None]) != 0
