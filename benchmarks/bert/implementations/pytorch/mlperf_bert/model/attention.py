"""Self-attention inside each sequence of an unpadded batch: four policies, one signature.

Shape letters: B sequences, S padded length, T tokens, N heads, H head size.

A policy is `attend(q, k, v, layout, site) -> context`, all of q, k, v and context [T, N, H]
in one floating dtype; token t sees exactly the tokens of its own sequence, scores are divided by
sqrt(H), and dropout acts on the probabilities (BERT, arXiv 1810.04805; Transformer, arXiv
1706.03762, section 3.2.1; unpadded form: arXiv 2208.08124).
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mlperf_bert.config import AttentionName
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.attention_layout import AttentionLayout
from mlperf_bert.model.dropout import DropoutSite, dropout


class AttentionPolicy(Protocol):
    """The signature all policies share; see the module's docstring for shapes."""

    __name__: str

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None, /
    ) -> Tensor:
        """Context [T, N, H] of queries, keys and values [T, N, H]."""
        ...


def reference(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """Padded, dense and readable: what the others must agree with. Any device and dtype."""
    _, num_heads, head_size = q.shape
    slots, key_is_real = layout.padded_slots, layout.key_is_real
    num_sequences, padded_length = key_is_real.shape

    def pad(x: Tensor) -> Tensor:  # [T, N, H] -> [B, N, S, H]
        flat = x.new_zeros(num_sequences * padded_length, num_heads, head_size)
        flat = flat.index_copy(0, slots, x)
        return flat.view(num_sequences, padded_length, num_heads, head_size).transpose(1, 2)

    scores = pad(q) @ pad(k).transpose(-1, -2) * head_size**-0.5  # [B, N, S, S]
    scores = scores.masked_fill(~key_is_real[:, None, None, :], float("-inf"))
    probabilities = dropout(torch.softmax(scores, dim=-1), site)
    context = (probabilities.to(v.dtype) @ pad(v)).transpose(1, 2)  # [B, S, N, H]
    return context.reshape(-1, num_heads, head_size).index_select(0, slots)


def grouped(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """One padded attention per group of sequences of similar length.

    Runs on any device and dtype. All lengths are known on the host, so nothing waits for a device.
    """
    groups = layout.groups
    sizes = [group.num_slots for group in groups.members]
    parts = [
        _to_slots(x, groups.slot_token, groups.token_slot).split_with_sizes(sizes)
        for x in (q, k, v)
    ]
    contexts = []
    for group, *rows in zip(groups.members, *parts, strict=True):
        shape = (group.num_sequences, group.padded_length, *q.shape[1:])
        group_q, group_k, group_v = (x.view(shape).transpose(1, 2) for x in rows)
        context = _attend_padded(group_q, group_k, group_v, group.key_is_real, site)
        contexts.append(context.transpose(1, 2).reshape(group.num_slots, *q.shape[1:]))
    joined = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
    return joined if groups.token_slot is None else joined.index_select(0, groups.token_slot)


def packed(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """Several sequences in a row of fixed length, each seeing itself only (arXiv 2107.02027).

    One dense attention with a block-diagonal mask, in rows of one shape: for hardware without
    variable-length attention. Any device and dtype; everything but attention stays unpadded.
    """
    rows = layout.rows
    shape = (len(rows.is_visible), rows.length, *q.shape[1:])
    row_q, row_k, row_v = (
        _to_slots(x, rows.slot_token, rows.token_slot).view(shape).transpose(1, 2)
        for x in (q, k, v)
    )
    context = _attend_padded(row_q, row_k, row_v, rows.is_visible, site)
    return context.transpose(1, 2).reshape(-1, *q.shape[1:]).index_select(0, rows.token_slot)


def _attend_padded(
    q: Tensor, k: Tensor, v: Tensor, is_visible: Tensor | None, site: DropoutSite | None
) -> Tensor:
    """[B, N, S, H] of the same; `is_visible` bool [B, 1, 1 or S, S], or None where all keys are."""
    if site is None or q.device.type != "cpu":
        dropout_p = 0.0 if site is None else site.probability
        return F.scaled_dot_product_attention(q, k, v, attn_mask=is_visible, dropout_p=dropout_p)
    # On a CPU torch has no fused attention with dropout; this is its plain way, with our dropout.
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if is_visible is not None:  # added in place: the product's backward does not need its result
        scores += scores.new_zeros(is_visible.shape).masked_fill_(~is_visible, float("-inf"))
    return dropout(torch.softmax(scores, dim=-1), site).to(v.dtype) @ v


def varlen(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, site: DropoutSite | None
) -> Tensor:
    """PyTorch's variable-length flash kernels, dropout included. CUDA, bf16 or fp16.

    Not yet run on a GPU. FlashAttention-2: arXiv 2307.08691; the public `varlen_attn` has no
    dropout, the operators under it do. Raises ConfigError for any other dtype.
    """
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            "model.attention",
            f"'varlen' got {q.dtype}",
            "set model.precision to 'bf16' or use 'grouped'",
        )
    context: Tensor = _VarlenAttention.apply(
        q, k, v, layout.cu_seqlens, layout.max_seqlen, 0.0 if site is None else site.probability
    )  # type: ignore[no-untyped-call]
    return context


def choose_attention(
    name: AttentionName, device: torch.device, dtype: torch.dtype, head_size: int
) -> AttentionPolicy:
    """The policy of that name; "auto" is "varlen" where that can run, else "grouped".

    Args:
        name: value of model.attention.
        device: where the model lives.
        dtype: of q, k and v, which is autocast's dtype where that is on.
        head_size: channels of a head; flash kernels take multiples of 8 up to 256.

    Raises:
        ConfigError: "varlen" where its kernels cannot run.
    """
    can_run_varlen = (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and hasattr(torch.ops.aten, "_flash_attention_forward")
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and head_size % 8 == 0
        and head_size <= 256
    )
    if name == "varlen" and not can_run_varlen:
        raise ConfigError(
            "model.attention",
            f"'varlen' cannot run on {device.type} in {dtype} with heads of {head_size}",
            "use 'grouped' (or a CUDA device of capability 8.0 with model.precision = 'bf16')",
        )
    if name == "auto":
        name = "varlen" if can_run_varlen else "grouped"
    policies: dict[str, AttentionPolicy] = {
        "reference": reference,
        "grouped": grouped,
        "packed": packed,
        "varlen": varlen,
    }
    return policies[name]


def _to_slots(x: Tensor, slot_token: Tensor | None, token_slot: Tensor | None) -> Tensor:
    if slot_token is None or token_slot is None:
        return x
    rows: Tensor = _GatherSlots.apply(x, slot_token, token_slot)  # type: ignore[no-untyped-call]
    return rows


class _GatherSlots(torch.autograd.Function):
    """x[slot_token], with a gather as backward too.

    Autograd would scatter-add all slots. No gradient reaches a padding slot (no token sees
    its key, its context is not used), so each token's gradient is exactly that of its own slot.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot_token: Tensor, token_slot: Tensor) -> Tensor:
        ctx.save_for_backward(token_slot)
        return x.index_select(0, slot_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (token_slot,) = ctx.saved_tensors
        return grad.index_select(0, token_slot), None, None


class _VarlenAttention(torch.autograd.Function):
    """The aten flash operators; the forward's random state makes the backward's same dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout_p: float,
    ) -> Tensor:
        context, logsumexp, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, False, False
        )
        ctx.save_for_backward(q, k, v, context, logsumexp, cu_seqlens, rng_state, unused)
        ctx.max_seqlen, ctx.dropout_p = max_seqlen, dropout_p
        return context  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, context, logsumexp, cu_seqlens, rng_state, unused = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            q,
            k,
            v,
            context,
            logsumexp,
            cu_seqlens,
            cu_seqlens,
            ctx.max_seqlen,
            ctx.max_seqlen,
            ctx.dropout_p,
            False,
            rng_state,
            unused,
        )
        return grad_q, grad_k, grad_v, None, None, None
