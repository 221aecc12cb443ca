"""Variable-length attention by operators that torch brings: flash kernels, and cuDNN's.

Shape letters: B sequences, T tokens, R queries, N heads, H head size.

Both policies are for CUDA, in bf16 or fp16, take the bounds of sequences from the device and drop
by torch's generator, whose state the forward hands to the backward. The public `varlen_attn` of
torch has no dropout; these operators under it do. Neither has been run on a GPU yet.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from mlperf_bert.model.attention_layout import AttentionLayout
from mlperf_bert.model.dropout_keys import DropoutSite


def flash(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """FlashAttention-2 (arXiv 2307.08691). Heads of at most 256 channels, a multiple of 8."""
    context: Tensor = _VarlenAttention.apply(q, k, v, layout, site, "flash")  # type: ignore[no-untyped-call]
    return context


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """cuDNN's attention over ragged rows: heads of at most 128 channels, a multiple of 8.

    Its backward in torch 2.13 and older takes the head size for the length of the longest sequence
    and writes behind its buffer (github.com/pytorch/pytorch/pull/186142): `choices`
    lets it run from torch 2.14 on.
    """
    context: Tensor = _VarlenAttention.apply(q, k, v, layout, site, "cudnn")  # type: ignore[no-untyped-call]
    return context


class _VarlenAttention(torch.autograd.Function):
    """Saves logsumexp, float32 [N, R] (cuDNN's [N, R, 1]), and two tensors of random state."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: AttentionLayout,
        site: DropoutSite | None,
        operators: Literal["flash", "cudnn"],
    ) -> Tensor:
        starts, longest = (
            (layout.cu_queries, layout.cu_seqlens),
            (layout.max_queries, layout.max_length),
        )
        dropout_p = 0.0 if site is None else site.probability
        if operators == "flash":
            context, logsumexp, *random_state, _ = torch.ops.aten._flash_attention_forward(
                q, k, v, *starts, *longest, dropout_p, False, False
            )
        else:
            results = torch.ops.aten._cudnn_attention_forward(
                q, k, v, None, *starts, *longest, True, dropout_p, False, False
            )
            context, logsumexp, random_state = results[0], results[1], results[6:8]
        ctx.save_for_backward(q, k, v, context, logsumexp, *starts, *random_state)
        ctx.not_tensors = longest, dropout_p, operators
        return context  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, context, logsumexp, *starts, seed, offset = ctx.saved_tensors
        longest, dropout_p, operators = ctx.not_tensors
        of_forward = (grad.contiguous(), q, k, v, context, logsumexp)
        bounds, random_state = (*starts, *longest), (seed, offset)
        if operators == "flash":
            gradients = torch.ops.aten._flash_attention_backward(
                *of_forward, *bounds, dropout_p, False, *random_state
            )
        else:
            no_bias = None
            gradients = torch.ops.aten._cudnn_attention_backward(
                *of_forward, *random_state, no_bias, *bounds, dropout_p, False
            )
        return *gradients, None, None, None
