"""Variable-length attention with keyed dropout on a GPU, in Triton: the policy and its forward.

Shape letters: B sequences, T tokens, R queries, N heads, H head size.

Softmax is computed block by block as keys pass by, and only its logarithmic sum is kept for the
backward (FlashAttention-2, arXiv 2307.08691). One program has a block of queries of one sequence
and head; programs behind a sequence's end return at once. Bounds of sequences are read on the
device and every result has a fixed shape, so a step with these kernels can be captured. Sums are
float32. What dropout keeps is read from bits that another kernel wrote (`model/dropout.py`).
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlperf_bert.model.attention_layout import AttentionLayout
from mlperf_bert.model.dropout import DropoutSite, attention_keep_bits, scale_of
from mlperf_bert.model.triton_attention_backward import gradients
from mlperf_bert.model.triton_tiles import (
    KEYS,
    LOG2_E,
    Saved,
    Tile,
    kept_in_rows,
    load_keep,
    load_tile,
    row_numbers,
    span,
    store_tile,
)

TILES = MappingProxyType(  # by head size
    {
        16: Tile(128, 4, 3),
        32: Tile(128, 4, 3),
        64: Tile(128, 8, 3, 128),
        128: Tile(128, 8, 3),
    }
)


def _kernel(function: Callable[..., None]) -> Any:
    # Otherwise compiled once more for a number of rows that is a multiple of 16.
    return triton.jit(function, do_not_specialize=["num_rows"])


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """The policy: see `model/attention.py`. bf16 or fp16, H one of 16, 32, 64 and 128.

    Rows behind the last sequence are neither read nor written.
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
        )
        ctx.max_queries, ctx.max_length = layout.max_queries, layout.max_length
        ctx.keep_scale = None if site is None else scale_of(site.probability)
        _launch(saved, ctx.max_queries, ctx.keep_scale)
        ctx.save_for_backward(*saved)
        return saved.context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = Saved(*ctx.saved_tensors)
        longest = (ctx.max_queries, ctx.max_length)
        return *gradients(_in_rows(grad), saved, *longest, ctx.keep_scale), None, None


def _in_rows(x: Tensor) -> Tensor:
    """[rows, N, H] whose rows lie anywhere, but each in one piece."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _launch(saved: Saved, max_queries: int, keep_scale: float | None) -> None:
    num_rows, num_heads, head_size = saved.q.shape
    tile = TILES[head_size]
    grid = (triton.cdiv(max_queries, tile.queries), num_heads, len(saved.cu_queries) - 1)
    _attention_forward[grid](
        *saved,
        *(x.stride(0) for x in (saved.q, saved.k, saved.v)),
        num_rows,
        saved.keep.shape[-1],
        head_size**-0.5,
        keep_scale,
        head_size,
        tile.queries,
        KEYS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.most_registers,
    )


@_kernel
def _attention_forward(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    context: tl.tensor,
    logsumexp: tl.tensor,
    keep: tl.tensor,
    cu_queries: tl.tensor,
    cu_seqlens: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    num_rows: tl.tensor,
    num_words: tl.tensor,
    scale: tl.constexpr,
    keep_scale: tl.constexpr,
    head_size: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    queries, keys = span(cu_queries), span(cu_seqlens)
    first = tl.program_id(0) * block_q
    if first < queries[1]:
        own_q = load_tile(q, q_stride, queries, first, block_q, head_size)
        highest = tl.full((block_q,), float("-inf"), tl.float32)
        total = tl.zeros((block_q,), tl.float32)
        sums = tl.zeros((block_q, head_size), tl.float32)
        key = tl.arange(0, block_k)
        # Zero, but not to the compiler, which would round first and then select 16 bits: slower.
        nothing = tl.minimum(keys[1], 0).to(tl.float32)
        for start in range(0, keys[1], block_k):
            own_k = load_tile(k, k_stride, keys, start, block_k, head_size)
            scores = tl.dot(own_q, tl.trans(own_k))
            if start + block_k > keys[1]:  # the last block alone pays for the comparisons
                scores = tl.where((key < keys[1] - start)[None, :], scores, float("-inf"))
            # In powers of two, which the hardware has an instruction for.
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
        stride = tl.num_programs(1) * head_size
        store_tile(context, stride, queries, first, sums * inverse[:, None], block_q, head_size)
        query = first + tl.arange(0, block_q)
        at = row_numbers(num_rows, queries, query)
        tl.store(logsumexp + at, highest + tl.log2(total), mask=query < queries[1])
