"""Variable-length attention with keyed dropout on a GPU, in Triton: the policy and its kernels.

Shape letters: B sequences, T tokens, R queries, N heads, H head size.

Softmax is computed over one block of keys after another. Only its logarithmic sum is kept; the
backward recomputes the probabilities (FlashAttention-2, arXiv 2307.08691), with one kernel for the
queries' gradient and one for the others. Sums are float32, and one program sums each gradient in a
fixed order, so results repeat bit by bit.

A program computes a block of queries, or of keys, of one sequence and head: its second number is
its head, its third its sequence. Programs past a sequence's end return at once. Sequence bounds are
read on the device and every result has a fixed shape, so a step with these kernels can be captured.
Dropout is read from keep bits that another kernel wrote (`model/dropout.py`). Places count from the
sequence's first row, so only that row's address needs 64 bits.

Rotary positions are applied in registers wherever queries and keys are loaded, and undone where
their gradients are stored, so they need no pass over memory. With a reach (sliding window), loops
run over the blocks in which something can be visible; only blocks on its edges are compared.
"""

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlperf_bert.model.attention_layout import AttentionLayout
from mlperf_bert.model.dropout import attention_keep_bits
from mlperf_bert.model.dropout_keys import DropoutSite, scale_of

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
KEYS = 64  # keys of a tile: their keep bits are read at once, as two words
# A score that is not visible. It is finite because a query may see nothing in its first blocks; the
# first visible score shrinks to zero what these add. It is a power of two so that a multiple of it
# is exact, and the maximum of such a block less itself is zero.
HIDDEN: tl.constexpr = tl.constexpr(-(2.0**100))
FAR: tl.constexpr = tl.constexpr(2**30)  # a place behind every sequence
SEARCHED: tl.constexpr = tl.constexpr(1024)  # positions of queries that are searched at once


class Saved(NamedTuple):
    """Tensors saved by the forward; heads and channels of a row are contiguous."""

    q: Tensor  # [R, N, H]
    k: Tensor  # [T, N, H]
    v: Tensor  # [T, N, H]
    context: Tensor  # [R, N, H]
    logsumexp: Tensor  # float32 [N, R]: log2 of the sum of 2 ** (scores / ln 2) of a query
    keep: Tensor  # int32 [R, N, words]: `attention_keep_bits`; empty without dropout
    cu_queries: Tensor  # int32 [B + 1]
    cu_seqlens: Tensor  # int32 [B + 1]
    positions: Tensor | None  # int64 [R]: each query's place; None if that is its row's own
    cos: Tensor | None  # float32 [longest, H / 2]; None without rotation
    sin: Tensor | None


class Tile(NamedTuple):
    """Launch constants: the queries that a program holds beside 64 keys, and how it runs.

    They are not measured at the start because sums depend on them: a run repeats bit by bit on any
    machine of its kind and after a restart.
    """

    queries: int
    num_warps: int
    num_stages: int  # stages of the loop over the others
    most_registers: int | None = None  # registers a thread; the compiler chooses if None


# Factor of kept elements (None without dropout), and the layout's reach.
Constants = tuple[float | None, int | None]

TILES = MappingProxyType(  # by head size
    {
        16: Tile(128, 4, 3),
        32: Tile(128, 4, 3),
        64: Tile(128, 8, 3, 128),
        128: Tile(128, 8, 3),
    }
)
TILES_OF_QUERIES = MappingProxyType(  # in backward
    {
        16: Tile(64, 4, 3),
        32: Tile(64, 4, 3),
        64: Tile(64, 4, 2),
        128: Tile(64, 8, 2),
    }
)
TILES_OF_KEYS = MappingProxyType({**TILES_OF_QUERIES, 64: Tile(64, 4, 3)})


def _kernel(function: Callable[..., Any]) -> Any:
    # Otherwise recompiled for a number of rows that is a multiple of 16.
    rows = ["num_rows"] if "num_rows" in function.__annotations__ else []
    return triton.jit(function, do_not_specialize=rows)


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """The policy: see `model/attention.py`. bf16 or fp16, H one of 16, 32, 64 and 128.

    Rows after the last sequence are neither read nor written.
    """
    context: Tensor = _Attention.apply(q, k, v, layout, site)  # type: ignore[no-untyped-call]
    return context


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
    ) -> Tensor:
        q, k, v = (_in_rows(x) for x in (q, k, v))
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
            positions=_positions_of(layout),
            cos=None if layout.rotary is None else layout.rotary.cos,
            sin=None if layout.rotary is None else layout.rotary.sin,
        )
        ctx.max_queries, ctx.max_length = layout.max_queries, layout.max_length
        ctx.constants = None if site is None else scale_of(site.probability), layout.reach
        strides = tuple(x.stride(0) for x in (q, k, v))
        tile = TILES[q.shape[2]]
        blocks = triton.cdiv(ctx.max_queries, tile.queries)
        _launch(_attention_forward, tile, blocks, saved, saved, strides, ctx.constants)
        ctx.save_for_backward(*saved)
        return saved.context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = Saved(*ctx.saved_tensors)
        longest = (ctx.max_queries, ctx.max_length)
        return *_gradients(_in_rows(grad), saved, *longest, ctx.constants), None, None


def _positions_of(layout: AttentionLayout) -> Tensor | None:
    """Positions of the queries, where they are needed and not simply their rows' numbers."""
    if layout.queries is None or (layout.rotary is None and layout.reach is None):
        return None
    return layout.query_positions


def _in_rows(x: Tensor) -> Tensor:
    """`x` as [rows, N, H] with each row contiguous; the rows may lie anywhere."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _launch(
    kernel: Any,
    tile: Tile,
    blocks: int,
    saved: Saved,
    tensors: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
    constants: Constants,
) -> None:
    """Launch `blocks` programs for each head and sequence; `tensors` have rows of `strides`."""
    num_rows, num_heads, head_size = saved.q.shape
    kernel[(blocks, num_heads, len(saved.cu_queries) - 1)](
        *(tuple(tensors), strides, num_rows, saved.keep.shape[-1], head_size**-0.5, *constants),
        *(head_size, tile.queries, KEYS),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.most_registers,
    )


def _gradients(
    grad: Tensor, saved: Saved, max_queries: int, max_length: int, constants: Constants
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: columns of one tensor, or only k's and v's if queries are fewer.

    This is the layout that a product with all three weights needs (`fused_blocks.py`).

    Args:
        grad: gradient of the context, [R, N, H], each row contiguous.
        saved: tensors saved by the forward.
        max_queries: most queries of one sequence.
        max_length: most keys of one sequence.
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
    tile = TILES_OF_QUERIES[q.shape[2]]
    blocks = triton.cdiv(max_queries, tile.queries)
    _launch(
        _attention_of_queries,
        tile,
        blocks,
        saved,
        (*saved, grad, statistics, grad_q),
        strides,
        constants,
    )
    tensors = (q, k, v, *saved[5:], grad, statistics, grad_k, grad_v)
    tile, blocks = TILES_OF_KEYS[q.shape[2]], triton.cdiv(max_length, KEYS)
    _launch(_attention_of_keys, tile, blocks, saved, tensors, strides, constants)
    return grad_q, grad_k, grad_v


@_kernel
def _attention_forward(
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
    q, k, v, context, logsumexp, keep, cu_queries, cu_seqlens, positions, cos, sin = tensors
    of_queries, of_keys = (positions, cos, sin), (None, cos, sin)
    q_stride, k_stride, v_stride = strides
    queries, keys = _span(cu_queries), _span(cu_seqlens)
    first = tl.program_id(0) * block_q
    if first < queries[1]:
        own_q = _load_rotated(q, q_stride, queries, first, of_queries, block_q, head_size)
        highest = tl.full((block_q,), float("-inf"), tl.float32)
        total = tl.zeros((block_q,), tl.float32)
        sums = tl.zeros((block_q, head_size), tl.float32)
        key = tl.arange(0, block_k)
        # A zero hidden from the compiler, which would round first and then select 16 bits: slower.
        nothing = tl.minimum(keys[1], 0).to(tl.float32)
        begin, end = 0, keys[1]
        if reach is not None:
            position, ends = _positions(positions, queries, first, block_q)
            begin = tl.maximum(ends[0] - reach, 0) // block_k * block_k
            end = tl.minimum(ends[1] + reach + 1, keys[1])
        for start in range(begin, end, block_k):
            own_k = _load_rotated(k, k_stride, keys, start, of_keys, block_k, head_size)
            scores = tl.dot(own_q, tl.trans(own_k))
            if reach is not None:
                scores = _hide(scores, position, ends, keys, start, reach, block_k, False)
            elif start + block_k > keys[1]:  # only the last block pays for the comparisons
                scores = tl.where((key < keys[1] - start)[None, :], scores, float("-inf"))
            # In powers of two, for which the hardware has an instruction.
            higher = tl.maximum(highest, tl.max(scores, 1) * (scale * LOG2_E))
            weights = tl.exp2(tl.fma(scores, scale * LOG2_E, -higher[:, None]))
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.sum(weights, 1)
            if keep_scale is not None:
                words = _load_keep(keep, num_words, queries, first, block_q, start)
                weights = tl.where(_kept_in_rows(words, key), weights, nothing)
            own_v = _load_tile(v, v_stride, keys, start, block_k, head_size)
            sums = tl.dot(weights.to(own_v.dtype), own_v, sums * shrink[:, None])
            highest = higher
        inverse = (1.0 if keep_scale is None else keep_scale) / total
        stride = tl.num_programs(1) * head_size
        _store_tile(context, stride, queries, first, sums * inverse[:, None], block_q, head_size)
        query = first + tl.arange(0, block_q)
        at = _row_numbers(num_rows, queries, query)
        tl.store(logsumexp + at, highest + tl.log2(total), mask=query < queries[1])


@_kernel
def _attention_of_queries(
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
    """Gradient of a block of queries, and each query's context times its gradient."""
    q, k, v, context, logsumexp, keep, cu_queries, cu_seqlens, positions, cos, sin = tensors[:11]
    grad, statistics, grad_q = tensors[11:]
    of_queries, of_keys = (positions, cos, sin), (None, cos, sin)
    q_stride, k_stride, v_stride, grad_stride, grad_q_stride, _ = strides
    queries, keys = _span(cu_queries), _span(cu_seqlens)
    first = tl.program_id(0) * block_q
    if first < queries[1]:
        own_q = _load_rotated(q, q_stride, queries, first, of_queries, block_q, head_size)
        own_grad = _load_tile(grad, grad_stride, queries, first, block_q, head_size)
        stride = tl.num_programs(1) * head_size
        own_context = _load_tile(context, stride, queries, first, block_q, head_size)
        product = tl.sum(own_context.to(tl.float32) * own_grad.to(tl.float32), 1)
        product = product if keep_scale is None else product / keep_scale
        query = first + tl.arange(0, block_q)
        is_query = query < queries[1]
        at = _row_numbers(num_rows, queries, query)
        log_sum = tl.load(logsumexp + at, mask=is_query, other=0.0)
        tl.store(statistics + 2 * at, -log_sum, mask=is_query)
        tl.store(statistics + 2 * at + 1, -product, mask=is_query)
        sums = tl.zeros((block_q, head_size), tl.float32)
        key = tl.arange(0, block_k)
        begin, end = 0, keys[1]
        if reach is not None:
            position, ends = _positions(positions, queries, first, block_q)
            begin = tl.maximum(ends[0] - reach, 0) // block_k * block_k
            end = tl.minimum(ends[1] + reach + 1, keys[1])
        for start in range(begin, end, block_k):
            own_k = _load_rotated(k, k_stride, keys, start, of_keys, block_k, head_size)
            own_v = _load_tile(v, v_stride, keys, start, block_k, head_size)
            scores = tl.dot(own_q, tl.trans(own_k))
            of_weights = tl.dot(own_grad, tl.trans(own_v))
            # A key past the sequence's end would be exp2(-log_sum), perhaps infinite.
            if reach is not None:
                scores = _hide(scores, position, ends, keys, start, reach, block_k, False)
            elif start + block_k > keys[1]:
                scores = tl.where((key < keys[1] - start)[None, :], scores, float("-inf"))
            weights = tl.exp2(tl.fma(scores, scale * LOG2_E, -log_sum[:, None]))
            if keep_scale is not None:
                words = _load_keep(keep, num_words, queries, first, block_q, start)
                of_weights = tl.where(_kept_in_rows(words, key), of_weights, 0.0)
            of_scores = weights * (of_weights - product[:, None])
            sums = tl.dot(of_scores.to(own_k.dtype), own_k, sums)
        sums *= scale if keep_scale is None else scale * keep_scale
        _store_rotated(grad_q, grad_q_stride, queries, first, of_queries, sums, block_q, head_size)


@_kernel
def _attention_of_keys(
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
    """Gradients of a block of keys and their values; tiles are [keys, queries]."""
    q, k, v, keep, cu_queries, cu_seqlens, positions, cos, sin = tensors[:9]
    grad, statistics, grad_k, grad_v = tensors[9:]
    of_queries, of_keys = (positions, cos, sin), (None, cos, sin)
    q_stride, k_stride, v_stride, grad_stride, _, grad_kv_stride = strides
    queries, keys = _span(cu_queries), _span(cu_seqlens)
    first = tl.program_id(0) * block_k
    if first < keys[1]:
        own_k = _load_rotated(k, k_stride, keys, first, of_keys, block_k, head_size)
        own_v = _load_tile(v, v_stride, keys, first, block_k, head_size)
        sums_k = tl.zeros((block_k, head_size), tl.float32)
        sums_v = tl.zeros((block_k, head_size), tl.float32)
        key = tl.arange(0, block_k)
        of_head = statistics + tl.program_id(1).to(tl.int64) * num_rows * 2
        begin, end = 0, queries[1]
        if reach is not None:
            begin, end = _in_reach(positions, queries, first - reach, first + block_k + reach)
            begin = begin // block_q * block_q
        for start in range(begin, end, block_q):
            # Past the last query q and grad are zero, so they add zero.
            own_q = _load_rotated(q, q_stride, queries, start, of_queries, block_q, head_size)
            own_grad = _load_tile(grad, grad_stride, queries, start, block_q, head_size)
            minus_log_sum, minus_product = _load_pairs(of_head, 2, queries, start, block_q)
            scores = tl.dot(own_k, tl.trans(own_q))
            if reach is not None:
                position, ends = _positions(positions, queries, start, block_q)
                scores = _hide(scores, position, ends, keys, first, reach, block_k, True)
            weights = tl.exp2(tl.fma(scores, scale * LOG2_E, minus_log_sum[None, :]))
            of_weights = tl.dot(own_v, tl.trans(own_grad))
            used = weights
            if keep_scale is not None:
                words = _load_keep(keep, num_words, queries, start, block_q, first)
                used = tl.where(_kept_in_columns(words, key), weights, 0.0)
            sums_v = tl.dot(used.to(own_grad.dtype), own_grad, sums_v)
            of_scores = tl.fma(used, of_weights, weights * minus_product[None, :])
            sums_k = tl.dot(of_scores.to(own_q.dtype), own_q, sums_k)
        if keep_scale is not None:
            sums_k *= keep_scale
            sums_v *= keep_scale
        sums_k *= scale
        _store_rotated(grad_k, grad_kv_stride, keys, first, of_keys, sums_k, block_k, head_size)
        _store_tile(grad_v, grad_kv_stride, keys, first, sums_v, block_k, head_size)


@_kernel
def _span(bounds: tl.tensor) -> Any:
    """Rows of the program's sequence: number of the first (int64), and their count."""
    first = tl.load(bounds + tl.program_id(2))
    return first.to(tl.int64), tl.load(bounds + tl.program_id(2) + 1) - first


@_kernel
def _load_tile(
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


@_kernel
def _store_tile(
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


@_kernel
def _load_rotated(
    x: tl.tensor,
    stride: tl.tensor,
    rows: tl.tuple,
    first: tl.tensor,
    turns: tl.tuple,
    size: tl.constexpr,
    head_size: tl.constexpr,
) -> Any:
    """`_load_tile` with each row rotated by its position, in float32; `turns` as for `_turns`."""
    if turns[1] is None:
        loaded = _load_tile(x, stride, rows, first, size, head_size)
    else:
        half: tl.constexpr = head_size // 2
        cosine, sine = _turns(turns, rows, first, size, half)
        at, is_real = _of_tile(x, stride, rows, first, size, head_size, half)
        one = tl.load(at, mask=is_real, other=0.0).to(tl.float32)
        other = tl.load(at + half, mask=is_real, other=0.0).to(tl.float32)
        rotated = tl.join(one * cosine - other * sine, other * cosine + one * sine)
        whole = tl.reshape(tl.permute(rotated, (0, 2, 1)), (size, head_size))
        loaded = whole.to(x.dtype.element_ty)
    return loaded


@_kernel
def _store_rotated(
    x: tl.tensor,
    stride: tl.tensor,
    rows: tl.tuple,
    first: tl.tensor,
    turns: tl.tuple,
    values: tl.tensor,
    size: tl.constexpr,
    head_size: tl.constexpr,
) -> None:
    """`_store_tile` of the gradient of what `_load_rotated` loaded: rotated back."""
    if turns[1] is None:
        _store_tile(x, stride, rows, first, values, size, head_size)
    else:
        half: tl.constexpr = head_size // 2
        cosine, sine = _turns(turns, rows, first, size, half)
        at, is_real = _of_tile(x, stride, rows, first, size, head_size, half)
        halves = tl.permute(tl.reshape(values, (size, 2, half)), (0, 2, 1))
        one, other = tl.split(halves)
        dtype: tl.constexpr = x.dtype.element_ty
        tl.store(at, (one * cosine + other * sine).to(dtype), mask=is_real)
        tl.store(at + half, (other * cosine - one * sine).to(dtype), mask=is_real)


@_kernel
def _turns(
    turns: tl.tuple, rows: tl.tuple, first: tl.tensor, size: tl.constexpr, half: tl.constexpr
) -> Any:
    """Cosines and sines [size, H / 2] at places `first` .. of the span `rows`.

    `turns` are the rows' positions (None: their places), and the tables.
    """
    positions, cos, sin = turns
    place = tl.arange(0, size)
    is_real = (place < rows[1] - first)[:, None]
    channel = tl.arange(0, half)[None, :]
    if positions is None:
        cos, sin = cos + first * half, sin + first * half
        at = place[:, None] * half + channel
    else:
        at = _positions(positions, rows, first, size)[0][:, None] * half + channel
    cosine = tl.load(cos + at, mask=is_real, other=0.0)
    return cosine, tl.load(sin + at, mask=is_real, other=0.0)


@_kernel
def _positions(positions: tl.tensor, rows: tl.tuple, first: tl.tensor, size: tl.constexpr) -> Any:
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


@_kernel
def _in_reach(positions: tl.tensor, rows: tl.tuple, lowest: tl.tensor, end: tl.tensor) -> Any:
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


@_kernel
def _hide(
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


@_kernel
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


@_kernel
def _row_numbers(num_rows: tl.tensor, rows: tl.tuple, place: tl.tensor) -> Any:
    """Indices into [N, num_rows] of the places of the span `rows`, int64."""
    return tl.program_id(1).to(tl.int64) * num_rows + rows[0] + place


@_kernel
def _load_pairs(
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


@_kernel
def _load_keep(
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
    return _load_pairs(of_head, stride, queries, first, size)


@_kernel
def _kept_in_rows(words: tl.tuple, key: tl.tensor) -> Any:
    """Bool [size, 64] of `_load_keep`; `key` is 0 .. 63.

    In a product's result, lanes of a warp differ in bits 1 and 2 of a column's number. These are
    shifted out once for all columns; the remaining shifts are constants.
    """
    halves = tl.where((key < 32)[None, :], words[0][:, None], words[1][:, None])
    return ((halves >> (key & 6)[None, :]) & (1 << (key & 25))[None, :]) != 0


@_kernel
def _kept_in_columns(words: tl.tuple, key: tl.tensor) -> Any:
    """Bool [64, size] of `_load_keep`; a thread's two rows differ in bit 3 of their number."""
    halves = tl.where((key < 32)[:, None], words[0][None, :], words[1][None, :])
    return ((halves >> (key & 23)[:, None]) & (1 << (key & 8))[:, None]) != 0
