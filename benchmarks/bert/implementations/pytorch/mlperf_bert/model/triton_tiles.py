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


class Saved(NamedTuple):
    """What the forward leaves behind; heads and channels of a row lie in one piece."""

    q: Tensor  # [R, N, H]
    k: Tensor  # [T, N, H]
    v: Tensor  # [T, N, H]
    context: Tensor  # [R, N, H]
    logsumexp: Tensor  # float32 [N, R]: log2 of the sum of 2 ** (scores / ln 2) of a query
    keep: Tensor  # uint8 [R, N, bytes]: `attention_keep_bits`; empty without dropout
    cu_queries: Tensor  # int32 [B + 1]
    cu_seqlens: Tensor  # int32 [B + 1]


class Tile(NamedTuple):
    """How much of the queries and keys a program holds at once, and how it is run."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int  # of the loop over the others


def _kernel(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


@_kernel
def span(bounds: tl.tensor) -> Any:
    """The rows of the program's sequence: number of the first (int64), how many."""
    first = tl.load(bounds + tl.program_id(2))
    return first.to(tl.int64), tl.load(bounds + tl.program_id(2) + 1) - first


@_kernel
def load_tile(
    x: tl.tensor, stride: tl.tensor, rows: tl.tuple, place: tl.tensor, head_size: tl.constexpr
) -> Any:
    """`x` [.., N, H] at the places of the span `rows`: [places, H]; zeros behind its end."""
    channel = tl.program_id(1) * head_size + tl.arange(0, head_size)
    at = place[:, None] * stride + channel[None, :]
    return tl.load(x + rows[0] * stride + at, mask=(place < rows[1])[:, None], other=0.0)


@_kernel
def store_tile(
    x: tl.tensor,
    stride: tl.tensor,
    rows: tl.tuple,
    place: tl.tensor,
    values: tl.tensor,
    head_size: tl.constexpr,
) -> None:
    """Write `x` [.., N, H] at the places of the span `rows`."""
    channel = tl.program_id(1) * head_size + tl.arange(0, head_size)
    at = x + rows[0] * stride + place[:, None] * stride + channel[None, :]
    tl.store(at, values.to(x.dtype.element_ty), mask=(place < rows[1])[:, None])


@_kernel
def at_rows(x: tl.tensor, num_rows: tl.tensor, rows: tl.tuple, place: tl.tensor) -> Any:
    """Addresses in `x` [N, num_rows] of the places of the span `rows`."""
    return x + tl.program_id(1).to(tl.int64) * num_rows + rows[0] + place


@_kernel
def is_kept(
    keep: tl.tensor,
    keep_bytes: tl.tensor,
    queries: tl.tuple,
    place: tl.tensor,
    first_key: tl.tensor,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
) -> Any:
    """Which probabilities are kept of places of the span `queries`, for keys from `first_key` on.

    Bool [block_q, block_k]; `first_key` and `block_k` are multiples of 8.
    """
    stride = tl.num_programs(1) * keep_bytes
    byte = first_key // 8 + tl.arange(0, block_k // 8)
    at = place[:, None] * stride + tl.program_id(1) * keep_bytes + byte[None, :]
    mask = (place < queries[1])[:, None] & (byte < keep_bytes)[None, :]
    bits = tl.load(keep + queries[0] * stride + at, mask=mask, other=0)
    each = (bits[:, :, None] >> tl.arange(0, 8)[None, None, :].to(tl.uint8)) & 1
    return tl.reshape(each, (block_q, block_k)) != 0
