"""Variable-length attention with keyed dropout on a GPU, as a policy and its Triton kernels.

Shapes use the letters B (sequences), T (tokens), R (queries), N (heads) and H (head size).

The kernels compute softmax over one block of keys after another. The forward pass saves only the
logarithm of the sum of exponentials, and the backward pass recomputes the probabilities
(FlashAttention-2, arXiv 2307.08691). The backward pass has one kernel for the gradient of the
queries and one for those of keys and values. Sums are float32, and a single program sums each
gradient in a fixed order, so results are reproducible bit for bit.

A program computes a block of queries, or of keys, of one sequence and head. Blocks are assigned to
sequences once per batch (`AttentionLayout.blocks`). Programs past a sequence's end return at once.
A step with these kernels can be captured, because sequence bounds are read on the device and every
launch and result has a fixed shape. Dropout is read from keep bits that another kernel has written
(`model/dropout.py`). Offsets are relative to the sequence's first row, so only that row's address
needs 64 bits.

With a reach (sliding window), loops run only over the blocks in which something can be visible, and
positions are compared only in the blocks at the window's edges. A separate kernel rotates queries
and keys once, before the others run. Their gradients are rotated back in registers when they are
stored. Rotating inside the loops took 30% to 60% more instructions, and spilled registers on an
A100. Source: logs/2026-11-22-kernels.
"""

import math
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlperf_bert.model.attention_layout import AttentionLayout, Rotary
from mlperf_bert.model.dropout import attention_keep_bits
from mlperf_bert.model.dropout_keys import DropoutSite, scale_of
from mlperf_bert.model.triton_parts import (
    block_of,
    hide,
    in_reach,
    kept_in_columns,
    kept_in_rows,
    kernel,
    load_keep,
    load_pairs,
    load_rotated,
    load_tile,
    positions_of,
    row_numbers,
    span,
    store_rotated,
    store_tile,
)

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
KEYS = 64  # keys per tile, whose keep bits are read together as two words


class Saved(NamedTuple):
    """The tensors that attention's forward pass saves for the backward pass.

    The heads and channels of a row are contiguous.
    """

    q: Tensor  # [R, N, H], rotated like k
    k: Tensor  # [T, N, H]
    v: Tensor  # [T, N, H]
    context: Tensor  # [R, N, H]
    logsumexp: Tensor  # float32 [N, R]: log2 of the sum of 2 ** (scores / ln 2) of each query
    keep: Tensor  # int32 [R, N, words] from `attention_keep_bits`, empty without dropout
    cu_queries: Tensor  # int32 [B + 1]
    cu_seqlens: Tensor  # int32 [B + 1]
    positions: Tensor | None  # int64 [R]: each query's position, or None if it equals the row's
    cos: Tensor | None  # float32 [longest, H / 2], or None without rotation
    sin: Tensor | None


class Tile(NamedTuple):
    """The launch constants of a kernel, which are the queries per tile and compiler options.

    A tile has 64 keys. The constants are fixed instead of tuned at startup, because the order of
    sums depends on them. Runs are therefore reproducible bit for bit on all machines of the same
    kind, and after a restart.
    """

    queries: int
    num_warps: int
    num_stages: int  # pipeline stages of the loop over the other blocks
    most_registers: int | None = None  # registers per thread, or None if the compiler chooses


# The factor of kept elements (None without dropout), and the layout's reach.
Constants = tuple[float | None, int | None]

# Tiles by head size, for the forward pass, for the gradient of queries, and for the gradients of
# keys and values.
TILES = MappingProxyType(
    {
        16: (Tile(128, 4, 3), Tile(64, 4, 3), Tile(64, 4, 3)),
        32: (Tile(128, 4, 3), Tile(64, 4, 3), Tile(64, 4, 3)),
        64: (Tile(128, 8, 3, 128), Tile(64, 4, 2), Tile(64, 4, 3)),
        128: (Tile(128, 8, 3), Tile(64, 8, 2), Tile(64, 8, 2)),
    }
)
# Tiles for layouts with a reach. Smaller blocks of queries waste fewer pairs outside the window.
# For example, with a reach of 64, a block of 64 queries needs three blocks of keys, and one of 128
# queries needs four. Without dropout no kernel spills registers, not even on an A100.
WINDOW_TILES = MappingProxyType(
    {
        16: (Tile(64, 4, 2), Tile(64, 4, 2), Tile(64, 4, 2)),
        32: (Tile(64, 4, 2), Tile(64, 4, 2), Tile(64, 4, 2)),
        64: (Tile(64, 4, 2), Tile(64, 4, 2), Tile(32, 4, 2)),
        128: (Tile(64, 4, 2), Tile(64, 8, 2), Tile(32, 8, 2)),
    }
)


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """Compute attention, with the signature of the policies in `model/attention.py`.

    The tensors are bf16, and H is 16, 32, 64 or 128. Rows after the last sequence are neither read
    nor written.
    """
    context: Tensor = _Attention.apply(q, k, v, layout, site)
    return context


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
    ) -> Tensor:
        q, k, v = (_in_rows(x) for x in (q, k, v))
        positions = _positions_of(layout)
        if layout.rotary is not None:
            q = _rotate(q, layout, layout.cu_queries, positions, layout.rotary)
            k = _rotate(k, layout, layout.cu_seqlens, None, layout.rotary)
        num_heads = q.shape[1]
        keep = q.new_empty(0, dtype=torch.int32)
        if site is not None:
            bounds = (layout.cu_seqlens, triton.cdiv(layout.max_length, KEYS) * KEYS)
            keep = attention_keep_bits(site, num_heads, *bounds, layout.cu_queries).view(
                torch.int32
            )
        saved = Saved(
            *(q, k, v),
            context=q.new_empty(q.shape),
            logsumexp=q.new_empty((num_heads, len(q)), dtype=torch.float32),
            keep=keep,
            cu_queries=layout.cu_queries,
            cu_seqlens=layout.cu_seqlens,
            positions=positions,
            cos=None if layout.rotary is None else layout.rotary.cos,
            sin=None if layout.rotary is None else layout.rotary.sin,
        )
        ctx.layout = layout
        ctx.constants = None if site is None else scale_of(site.probability), layout.reach
        strides = tuple(x.stride(0) for x in (q, k, v))
        tile, _, _ = _tiles(q.shape[2], layout.reach)
        blocks = layout.blocks(layout.cu_queries, len(q), tile.queries)
        _launch(_attention_forward, tile, blocks, saved, saved, strides, ctx.constants)
        ctx.save_for_backward(*saved)
        return saved.context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = Saved(*ctx.saved_tensors)
        return *_gradients(_in_rows(grad), saved, ctx.layout, ctx.constants), None, None


def _positions_of(layout: AttentionLayout) -> Tensor | None:
    """Return the positions of the queries, int64 [R].

    Returns None if no kernel needs them, or if they equal the row numbers within the sequence.
    """
    if layout.queries is None or (layout.rotary is None and layout.reach is None):
        return None
    return layout.query_positions


def _in_rows(x: Tensor) -> Tensor:
    """Return `x` [rows, N, H] with contiguous rows, which need not be adjacent in memory."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _rotate(
    x: Tensor, layout: AttentionLayout, bounds: Tensor, positions: Tensor | None, rotary: Rotary
) -> Tensor:
    """Rotate each row of `x` [rows, N, H] by its position in its sequence.

    Rows after the last sequence are not written.
    """
    rotated = x.new_empty(x.shape)
    blocks = layout.blocks(bounds, len(x), KEYS)
    others = (rotated, blocks, bounds, (positions, rotary.cos, rotary.sin))
    _rotate_rows[x.shape[1], len(blocks)](x, x.stride(0), *others, KEYS, x.shape[2])
    return rotated


def _tiles(head_size: int, reach: int | None) -> tuple[Tile, Tile, Tile]:
    return (TILES if reach is None else WINDOW_TILES)[head_size]


def _launch(
    program: Any,
    tile: Tile,
    blocks: Tensor,
    saved: Saved,
    tensors: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
    constants: Constants,
) -> None:
    """Launch a program per head and block. `strides` are the tensors' row strides."""
    num_rows, num_heads, head_size = saved.q.shape
    program[num_heads, len(blocks)](
        *(blocks, tuple(tensors), strides, num_rows, saved.keep.shape[-1], head_size**-0.5),
        *(*constants, head_size, tile.queries, KEYS),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.most_registers,
    )


def _gradients(
    grad: Tensor, saved: Saved, layout: AttentionLayout, constants: Constants
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v.

    If every row has a query, all three gradients are columns of one tensor, because a product with
    all three weights needs this layout (`fused_blocks.py`). Otherwise only the gradients of k and v
    are columns of one tensor.

    Args:
        grad: gradient of the context, [R, N, H], each row contiguous.
        saved: tensors saved by the forward pass.
        layout: the layout of the forward pass.
        constants: see Constants.
    """
    q, k, v = saved.q, saved.k, saved.v
    num_rows, num_heads, _ = q.shape
    if num_rows == len(k):
        grad_q, grad_k, grad_v = q.new_empty((num_rows, 3, *q.shape[1:])).unbind(1)
    else:
        grad_q = torch.empty_like(q)
        grad_k, grad_v = k.new_empty((len(k), 2, *k.shape[1:])).unbind(1)
    statistics = saved.logsumexp.new_empty((num_heads, num_rows, 2))
    strides = tuple(x.stride(0) for x in (q, k, v, grad, grad_q, grad_k))
    _, tile, tile_of_keys = _tiles(q.shape[2], constants[1])
    tensors: tuple[Tensor | None, ...] = (*saved, grad, statistics, grad_q)
    blocks = layout.blocks(layout.cu_queries, num_rows, tile.queries)
    _launch(_attention_of_queries, tile, blocks, saved, tensors, strides, constants)
    tensors = (q, k, v, *saved[5:], grad, statistics, grad_k, grad_v)
    blocks = layout.blocks(layout.cu_seqlens, len(k), KEYS)
    _launch(_attention_of_keys, tile_of_keys, blocks, saved, tensors, strides, constants)
    return grad_q, grad_k, grad_v


@kernel
def _attention_forward(
    blocks: tl.tensor,
    tensors: tl.tuple,
    strides: tl.tuple,
    num_rows: tl.tensor,
    num_words: tl.tensor,
    scale: tl.constexpr,
    keep_scale: tl.constexpr,
    reach: tl.constexpr,
    head_size: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    q, k, v, context, logsumexp, keep, cu_queries, cu_seqlens, positions = tensors[:9]
    q_stride, k_stride, v_stride = strides
    sequence, first = block_of(blocks, cu_queries, block_q)
    queries, keys = span(cu_queries, sequence), span(cu_seqlens, sequence)
    if first < queries[1]:
        own_q = load_tile(q, q_stride, queries, first, block_q, head_size)
        highest = tl.full((block_q,), float("-inf"), tl.float32)
        total = tl.zeros((block_q,), tl.float32)
        sums = tl.zeros((block_q, head_size), tl.float32)
        key = tl.arange(0, block_k)
        # This zero is computed to hide its value from the compiler. With a constant zero the
        # compiler would first round and then select 16-bit values, which is slower.
        nothing = tl.minimum(keys[1], 0).to(tl.float32)
        begin, end = 0, keys[1]
        if reach is not None:
            position, ends = positions_of(positions, queries, first, block_q)
            begin = tl.maximum(ends[0] - reach, 0) // block_k * block_k
            end = tl.minimum(ends[1] + reach + 1, keys[1])
        for start in range(begin, end, block_k):
            own_k = load_tile(k, k_stride, keys, start, block_k, head_size)
            scores = tl.dot(own_q, tl.trans(own_k))
            if reach is not None:
                scores = hide(scores, position, ends, keys, start, reach, block_k, False)
            elif start + block_k > keys[1]:  # only the last block needs the comparisons
                scores = tl.where((key < keys[1] - start)[None, :], scores, float("-inf"))
            # Powers of two are used because the hardware has an instruction for them.
            higher = tl.maximum(highest, tl.max(scores, 1) * (scale * LOG2_E))
            weights = tl.exp2(tl.fma(scores, scale * LOG2_E, -higher[:, None]))
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.sum(weights, 1)
            if keep_scale is not None:
                words = load_keep(keep, num_words, queries, first, block_q, start)
                weights = tl.where(kept_in_rows(words, key), weights, nothing)
            own_v = load_tile(v, v_stride, keys, start, block_k, head_size)
            sums = tl.dot(weights.to(own_v.dtype), own_v, sums * shrink[:, None])
            highest = higher
        inverse = (1.0 if keep_scale is None else keep_scale) / total
        stride = tl.num_programs(0) * head_size
        store_tile(context, stride, queries, first, sums * inverse[:, None], block_q, head_size)
        query = first + tl.arange(0, block_q)
        at = row_numbers(num_rows, queries, query)
        tl.store(logsumexp + at, highest + tl.log2(total), mask=query < queries[1])


@kernel
def _attention_of_queries(
    blocks: tl.tensor,
    tensors: tl.tuple,
    strides: tl.tuple,
    num_rows: tl.tensor,
    num_words: tl.tensor,
    scale: tl.constexpr,
    keep_scale: tl.constexpr,
    reach: tl.constexpr,
    head_size: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """Compute the gradients of a block of queries, and dot products for `_attention_of_keys`."""
    # The dot products are those of each context with its gradient.
    q, k, v, context, logsumexp, keep, cu_queries, cu_seqlens, positions, cos, sin = tensors[:11]
    grad, statistics, grad_q = tensors[11:]
    q_stride, k_stride, v_stride, grad_stride, grad_q_stride, _ = strides
    sequence, first = block_of(blocks, cu_queries, block_q)
    queries, keys = span(cu_queries, sequence), span(cu_seqlens, sequence)
    if first < queries[1]:
        own_q = load_tile(q, q_stride, queries, first, block_q, head_size)
        own_grad = load_tile(grad, grad_stride, queries, first, block_q, head_size)
        stride = tl.num_programs(0) * head_size
        own_context = load_tile(context, stride, queries, first, block_q, head_size)
        product = tl.sum(own_context.to(tl.float32) * own_grad.to(tl.float32), 1)
        product = product if keep_scale is None else product / keep_scale
        query = first + tl.arange(0, block_q)
        is_query = query < queries[1]
        at = row_numbers(num_rows, queries, query)
        log_sum = tl.load(logsumexp + at, mask=is_query, other=0.0)
        tl.store(statistics + 2 * at, -log_sum, mask=is_query)
        tl.store(statistics + 2 * at + 1, -product, mask=is_query)
        sums = tl.zeros((block_q, head_size), tl.float32)
        key = tl.arange(0, block_k)
        begin, end = 0, keys[1]
        if reach is not None:
            position, ends = positions_of(positions, queries, first, block_q)
            begin = tl.maximum(ends[0] - reach, 0) // block_k * block_k
            end = tl.minimum(ends[1] + reach + 1, keys[1])
        for start in range(begin, end, block_k):
            own_k = load_tile(k, k_stride, keys, start, block_k, head_size)
            own_v = load_tile(v, v_stride, keys, start, block_k, head_size)
            scores = tl.dot(own_q, tl.trans(own_k))
            grad_weights = tl.dot(own_grad, tl.trans(own_v))
            # Without the mask, a key past the sequence's end would have the weight exp2(-log_sum),
            # which could be infinite.
            if reach is not None:
                scores = hide(scores, position, ends, keys, start, reach, block_k, False)
            elif start + block_k > keys[1]:
                scores = tl.where((key < keys[1] - start)[None, :], scores, float("-inf"))
            weights = tl.exp2(tl.fma(scores, scale * LOG2_E, -log_sum[:, None]))
            if keep_scale is not None:
                words = load_keep(keep, num_words, queries, first, block_q, start)
                grad_weights = tl.where(kept_in_rows(words, key), grad_weights, 0.0)
            grad_scores = weights * (grad_weights - product[:, None])
            sums = tl.dot(grad_scores.to(own_k.dtype), own_k, sums)
        sums *= scale if keep_scale is None else scale * keep_scale
        turns = (positions, cos, sin)
        store_rotated(grad_q, grad_q_stride, queries, first, turns, sums, block_q, head_size)


@kernel
def _attention_of_keys(
    blocks: tl.tensor,
    tensors: tl.tuple,
    strides: tl.tuple,
    num_rows: tl.tensor,
    num_words: tl.tensor,
    scale: tl.constexpr,
    keep_scale: tl.constexpr,
    reach: tl.constexpr,
    head_size: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """Compute the gradients of a block of keys and of their values, in tiles [keys, queries]."""
    q, k, v, keep, cu_queries, cu_seqlens, positions, cos, sin = tensors[:9]
    grad, statistics, grad_k, grad_v = tensors[9:]
    q_stride, k_stride, v_stride, grad_stride, _, grad_kv_stride = strides
    sequence, first = block_of(blocks, cu_seqlens, block_k)
    queries, keys = span(cu_queries, sequence), span(cu_seqlens, sequence)
    if first < keys[1]:
        own_k = load_tile(k, k_stride, keys, first, block_k, head_size)
        own_v = load_tile(v, v_stride, keys, first, block_k, head_size)
        sums_k = tl.zeros((block_k, head_size), tl.float32)
        sums_v = tl.zeros((block_k, head_size), tl.float32)
        key = tl.arange(0, block_k)
        head_statistics = statistics + tl.program_id(0).to(tl.int64) * num_rows * 2
        begin, end = 0, queries[1]
        if reach is not None:
            begin, end = in_reach(positions, queries, first - reach, first + block_k + reach)
            begin = begin // block_q * block_q
        for start in range(begin, end, block_q):
            # Rows of q and grad past the last query are zero, so they add zero.
            own_q = load_tile(q, q_stride, queries, start, block_q, head_size)
            own_grad = load_tile(grad, grad_stride, queries, start, block_q, head_size)
            minus_log_sum, minus_product = load_pairs(head_statistics, 2, queries, start, block_q)
            scores = tl.dot(own_k, tl.trans(own_q))
            if reach is not None:
                position, ends = positions_of(positions, queries, start, block_q)
                scores = hide(scores, position, ends, keys, first, reach, block_k, True)
            weights = tl.exp2(tl.fma(scores, scale * LOG2_E, minus_log_sum[None, :]))
            grad_weights = tl.dot(own_v, tl.trans(own_grad))
            used = weights
            if keep_scale is not None:
                words = load_keep(keep, num_words, queries, start, block_q, first)
                used = tl.where(kept_in_columns(words, key), weights, 0.0)
            sums_v = tl.dot(used.to(own_grad.dtype), own_grad, sums_v)
            grad_scores = tl.fma(used, grad_weights, weights * minus_product[None, :])
            sums_k = tl.dot(grad_scores.to(own_q.dtype), own_q, sums_k)
        if keep_scale is not None:
            sums_k *= keep_scale
            sums_v *= keep_scale
        sums_k *= scale
        turns = (None, cos, sin)
        store_rotated(grad_k, grad_kv_stride, keys, first, turns, sums_k, block_k, head_size)
        store_tile(grad_v, grad_kv_stride, keys, first, sums_v, block_k, head_size)


@kernel
def _rotate_rows(
    x: tl.tensor,
    stride: tl.tensor,
    rotated: tl.tensor,
    blocks: tl.tensor,
    bounds: tl.tensor,
    turns: tl.tuple,
    size: tl.constexpr,
    head_size: tl.constexpr,
) -> None:
    sequence, first = block_of(blocks, bounds, size)
    rows = span(bounds, sequence)
    if first < rows[1]:
        values = load_rotated(x, stride, rows, first, turns, size, head_size)
        stride_of_rotated = tl.num_programs(0) * head_size
        store_tile(rotated, stride_of_rotated, rows, first, values, size, head_size)
