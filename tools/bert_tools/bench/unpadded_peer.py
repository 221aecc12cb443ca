"""`transformers`' BertForPreTraining without padding: one row of T tokens, its own attention only.

Attention goes through `transformers`' AttentionInterface to torch's nested tensors, whose fused
kernels on CUDA take sequences of unequal length and dropout. Everything else is `transformers`' own
code, the logits of all T tokens included.

Shape letters: B sequences, T tokens, N heads, H head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_tools.bench.peer import import_transformers
from mlperf_bert.data.batch import IGNORED, UnpaddedBatch

ATTENTION_NAME = "mlperf_bert_nested"


def unpadded_inputs(batch: UnpaddedBatch) -> dict[str, Any]:
    """What `unpadded_loss` takes, on the batch's device; [1, T] tensors among others."""
    labels = torch.full_like(batch.input_ids, IGNORED)
    labels[batch.masked_token_index] = batch.labels
    return {
        "tokens": {
            "input_ids": batch.input_ids[None],
            "token_type_ids": batch.token_type_ids[None],
            "position_ids": batch.position_ids[None],
            "cu_seqlens": batch.cu_seqlens.long(),
            "longest": batch.max_seqlen,
            "shortest": min(batch.lengths),
        },
        "first": batch.cu_seqlens[:-1].long(),
        "labels": labels,
        "next_sentence_label": batch.next_sentence_label,
    }


def use_nested_attention(peer: Any) -> None:
    """Let `peer` attend within the sequences of `cu_seqlens` only."""
    import_transformers().AttentionInterface.register(ATTENTION_NAME, nested_attention)
    peer.set_attn_implementation(ATTENTION_NAME)


def nested_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: Tensor,
    longest: int,
    shortest: int,
    scaling: float,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Context [1, T, N, H] of [1, N, T, H] each; the signature is that of AttentionInterface."""

    def nest(x: Tensor) -> Tensor:  # [1, N, T, H] -> [B, N, each length, H]
        nested = torch.nested.nested_tensor_from_jagged(
            x[0].transpose(0, 1), cu_seqlens, min_seqlen=shortest, max_seqlen=longest
        )
        return nested.transpose(1, 2)

    context = F.scaled_dot_product_attention(
        nest(query), nest(key), nest(value), dropout_p=dropout, scale=scaling
    )
    return context.transpose(1, 2).values()[None], None


def unpadded_loss(peer: Any, inputs: dict[str, Any]) -> Tensor:
    """The loss of BertForPreTraining, whose own forward takes one first token a row."""
    hidden = peer.bert(**inputs["tokens"]).last_hidden_state[0]
    pooled = peer.bert.pooler(hidden[inputs["first"]][:, None])
    words, pairs = peer.cls(hidden, pooled)
    loss: Tensor = F.cross_entropy(words, inputs["labels"]) + F.cross_entropy(
        pairs, inputs["next_sentence_label"]
    )
    return loss
