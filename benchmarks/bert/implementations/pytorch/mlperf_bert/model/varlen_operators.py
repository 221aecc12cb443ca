"""Variable-length attention by operators that torch brings: flash kernels, and cuDNN's.

Shape letters: B sequences, T tokens, R queries, N heads, H head size.

Both policies are for CUDA, in bf16 or fp16, take the bounds of sequences from the device and drop
by torch's generator, whose state the forward hands to the backward. The public `varlen_attn` of
torch has no dropout; these operators under it do. Neither has been run on a GPU yet.
"""

from typing import Any

import torch
from torch import Tensor

from mlperf_bert.model.attention_layout import AttentionLayout
from mlperf_bert.model.dropout_keys import DropoutSite


def flash(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """FlashAttention-2 (arXiv 2307.08691). Heads of at most 256 channels, a multiple of 8."""
    return _attend(_FlashAttention, q, k, v, layout, site)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """cuDNN's attention over ragged rows: heads of at most 128 channels, a multiple of 8.

    Its backward in torch 2.13 and older takes the head size for the length of the longest sequence
    and writes behind its buffer (github.com/pytorch/pytorch/pull/186142): `choices`
    lets it run from torch 2.14 on.
    """
    return _attend(_CudnnAttention, q, k, v, layout, site)


def _attend(
    function: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    site: DropoutSite | None,
) -> Tensor:
    bounds = (layout.cu_queries, layout.cu_seqlens, layout.max_queries, layout.max_length)
    context: Tensor = function.apply(q, k, v, *bounds, 0.0 if site is None else site.probability)
    return context


class _FlashAttention(torch.autograd.Function):
    """The aten operators: logsumexp float32 [N, R], two tensors of random state."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_queries: Tensor,
        cu_seqlens: Tensor,
        max_queries: int,
        max_length: int,
        dropout_p: float,
    ) -> Tensor:
        bounds = (cu_queries, cu_seqlens, max_queries, max_length)
        context, logsumexp, *random_state, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *bounds, dropout_p, False, False
        )
        ctx.save_for_backward(q, k, v, context, logsumexp, cu_queries, cu_seqlens, *random_state)
        ctx.not_tensors = (max_queries, max_length, dropout_p)
        return context  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, logsumexp, cu_queries, cu_seqlens, *random_state = ctx.saved_tensors
        max_queries, max_length, dropout_p = ctx.not_tensors
        bounds = (cu_queries, cu_seqlens, max_queries, max_length)
        gradients = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, context, logsumexp, *bounds, dropout_p, False, *random_state
        )
        return *gradients, None, None, None, None, None


class _CudnnAttention(torch.autograd.Function):
    """The same with cuDNN: logsumexp float32 [R, N, 1], seed and offset of the random state."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_queries: Tensor,
        cu_seqlens: Tensor,
        max_queries: int,
        max_length: int,
        dropout_p: float,
    ) -> Tensor:
        bounds = (cu_queries, cu_seqlens, max_queries, max_length)
        results = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, *bounds, True, dropout_p, False, False
        )
        context, logsumexp, random_state = results[0], results[1], results[6:8]
        ctx.save_for_backward(q, k, v, context, logsumexp, cu_queries, cu_seqlens, *random_state)
        ctx.not_tensors = (max_queries, max_length, dropout_p)
        return context  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, logsumexp, cu_queries, cu_seqlens, *random_state = ctx.saved_tensors
        max_queries, max_length, dropout_p = ctx.not_tensors
        gradients = torch.ops.aten._cudnn_attention_backward(
            grad.contiguous(),
            *(q, k, v, context, logsumexp),
            *random_state,
            None,  # no bias
            *(cu_queries, cu_seqlens, max_queries, max_length),
            dropout_p,
            False,
        )
        return *gradients, None, None, None, None, None
