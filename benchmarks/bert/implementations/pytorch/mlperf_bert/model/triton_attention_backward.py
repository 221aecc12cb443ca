"""The backward of `triton_attention`: one kernel for the queries' gradient, one for the others.

Shape letters: R queries, N heads, H head size.

Probabilities are computed anew from the saved logarithmic sums (FlashAttention-2, arXiv
2307.08691). Every gradient is summed by one program in a fixed order: the same bits each time.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlperf_bert.model.triton_tiles import (
    KEYS,
    LOG2_E,
    Saved,
    Tile,
    kept_in_columns,
    kept_in_rows,
    load_keep,
    load_pairs,
    load_tile,
    row_numbers,
    span,
    store_tile,
)

TILES_OF_QUERIES = MappingProxyType(  # by head size
    {
        16: Tile(64, 4, 3),
        32: Tile(64, 4, 3),
        64: Tile(64, 4, 2),
        128: Tile(64, 8, 2),
    }
)
TILES_OF_KEYS = MappingProxyType({**TILES_OF_QUERIES, 64: Tile(64, 4, 3)})


def _kernel(function: Callable[..., None]) -> Any:
    # Otherwise compiled once more for a number of rows that is a multiple of 16.
    return triton.jit(function, do_not_specialize=["num_rows"])


def gradients(
    grad: Tensor, saved: Saved, max_queries: int, max_length: int, keep_scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: columns of one tensor, or k's and v's where queries are fewer.

    So they lie as the gradient of a product with all three weights is wanted (`fused_blocks.py`).

    Args:
        grad: of the context, [R, N, H], each row in one piece.
        saved: by the forward.
        max_queries: of one sequence, at most.
        max_length: keys of one sequence, at most.
        keep_scale: what kept elements were multiplied by; None without dropout.
    """
    q, k, v = saved.q, saved.k, saved.v
    num_rows, num_heads, head_size = q.shape
    num_sequences = len(saved.cu_queries) - 1
    grad_q, grad_k, grad_v = _empty_gradients(q, k)
    statistics = saved.logsumexp.new_empty((num_heads, num_rows, 2))
    sizes = (
        *(x.stride(0) for x in (q, k, v, grad, grad_q, grad_k)),
        num_rows,
        saved.keep.shape[-1],
        head_size**-0.5,
        keep_scale,
        head_size,
    )
    tile = TILES_OF_QUERIES[head_size]
    _attention_of_queries[(triton.cdiv(max_queries, tile.queries), num_heads, num_sequences)](
        *saved,
        *(grad, statistics, grad_q),
        *sizes,
        tile.queries,
        KEYS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.most_registers,
    )
    tile = TILES_OF_KEYS[head_size]
    _attention_of_keys[(triton.cdiv(max_length, KEYS), num_heads, num_sequences)](
        *(q, k, v, saved.keep, saved.cu_queries, saved.cu_seqlens),
        *(grad, statistics, grad_k, grad_v),
        *sizes,
        tile.queries,
        KEYS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.most_registers,
    )
    return grad_q, grad_k, grad_v


def _empty_gradients(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if len(q) == len(k):
        of_q, of_k, of_v = q.new_empty((len(q), 3, *q.shape[1:])).unbind(1)
        return of_q, of_k, of_v
    of_k, of_v = k.new_empty((len(k), 2, *k.shape[1:])).unbind(1)
    return torch.empty_like(q), of_k, of_v


@_kernel
def _attention_of_queries(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    context: tl.tensor,
    logsumexp: tl.tensor,
    keep: tl.tensor,
    cu_queries: tl.tensor,
    cu_seqlens: tl.tensor,
    grad: tl.tensor,
    statistics: tl.tensor,
    grad_q: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    grad_stride: tl.tensor,
    grad_q_stride: tl.tensor,
    grad_kv_stride: tl.tensor,
    num_rows: tl.tensor,
    num_words: tl.tensor,
    scale: tl.constexpr,
    keep_scale: tl.constexpr,
    head_size: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """The gradient of a block of queries, and of each its context times the context's gradient."""
    queries, keys = span(cu_queries), span(cu_seqlens)
    first = tl.program_id(0) * block_q
    if first < queries[1]:
        own_q = load_tile(q, q_stride, queries, first, block_q, head_size)
        own_grad = load_tile(grad, grad_stride, queries, first, block_q, head_size)
        stride = tl.num_programs(1) * head_size
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
        for start in range(0, keys[1], block_k):
            own_k = load_tile(k, k_stride, keys, start, block_k, head_size)
            own_v = load_tile(v, v_stride, keys, start, block_k, head_size)
            scores = tl.dot(own_q, tl.trans(own_k))
            of_weights = tl.dot(own_grad, tl.trans(own_v))
            # A key behind the sequence's end would be exp2(-log_sum), perhaps infinite.
            if start + block_k > keys[1]:
                scores = tl.where((key < keys[1] - start)[None, :], scores, float("-inf"))
            weights = tl.exp2(tl.fma(scores, scale * LOG2_E, -log_sum[:, None]))
            if keep_scale is not None:
                words = load_keep(keep, num_words, queries, first, block_q, start)
                of_weights = tl.where(kept_in_rows(words, key), of_weights, 0.0)
            of_scores = weights * (of_weights - product[:, None])
            sums = tl.dot(of_scores.to(own_k.dtype), own_k, sums)
        sums *= scale if keep_scale is None else scale * keep_scale
        store_tile(grad_q, grad_q_stride, queries, first, sums, block_q, head_size)


@_kernel
def _attention_of_keys(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    keep: tl.tensor,
    cu_queries: tl.tensor,
    cu_seqlens: tl.tensor,
    grad: tl.tensor,
    statistics: tl.tensor,
    grad_k: tl.tensor,
    grad_v: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    grad_stride: tl.tensor,
    grad_q_stride: tl.tensor,
    grad_kv_stride: tl.tensor,
    num_rows: tl.tensor,
    num_words: tl.tensor,
    scale: tl.constexpr,
    keep_scale: tl.constexpr,
    head_size: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """The gradients of a block of keys and their values; tiles are [keys, queries]."""
    queries, keys = span(cu_queries), span(cu_seqlens)
    first = tl.program_id(0) * block_k
    if first < keys[1]:
        own_k = load_tile(k, k_stride, keys, first, block_k, head_size)
        own_v = load_tile(v, v_stride, keys, first, block_k, head_size)
        sums_k = tl.zeros((block_k, head_size), tl.float32)
        sums_v = tl.zeros((block_k, head_size), tl.float32)
        key = tl.arange(0, block_k)
        of_head = statistics + tl.program_id(1).to(tl.int64) * num_rows * 2
        for start in range(0, queries[1], block_q):
            # Behind the last query q and grad are zero, and so is what it adds.
            own_q = load_tile(q, q_stride, queries, start, block_q, head_size)
            own_grad = load_tile(grad, grad_stride, queries, start, block_q, head_size)
            minus_log_sum, minus_product = load_pairs(of_head, 2, queries, start, block_q)
            scores = tl.dot(own_k, tl.trans(own_q))
            weights = tl.exp2(tl.fma(scores, scale * LOG2_E, minus_log_sum[None, :]))
            of_weights = tl.dot(own_v, tl.trans(own_grad))
            used = weights
            if keep_scale is not None:
                words = load_keep(keep, num_words, queries, start, block_q, first)
                used = tl.where(kept_in_columns(words, key), weights, 0.0)
            sums_v = tl.dot(used.to(own_grad.dtype), own_grad, sums_v)
            of_scores = tl.fma(used, of_weights, weights * minus_product[None, :])
            sums_k = tl.dot(of_scores.to(own_q.dtype), own_q, sums_k)
        if keep_scale is not None:
            sums_k *= keep_scale
            sums_v *= keep_scale
        store_tile(grad_k, grad_kv_stride, keys, first, sums_k * scale, block_k, head_size)
        store_tile(grad_v, grad_kv_stride, keys, first, sums_v, block_k, head_size)
