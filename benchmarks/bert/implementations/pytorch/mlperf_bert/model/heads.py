"""Masked-LM and next-sentence heads, and the loss and accuracy of their logits.

Shape letters: B sequences, D hidden, V vocabulary (padded to a multiple of 8), P masked positions.

Padding words are ordinary words: their rows are trained and their logits take part in the softmax,
as in `transformers` built with vocab_size = V. No label ever names one.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import HeadName, ModelSection
from mlperf_bert.data.batch import IGNORED, UnpaddedBatch
from mlperf_bert.model.blocks import Blocks, cross_entropy_sum, logits_gradient, precise
from mlperf_bert.model.layers import META

CHUNK_ROWS = 1024  # at V 30,528: 125 MB of float32 logits; 17,000 positions need 2 GB


def chunked_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, chunk_rows: int = CHUNK_ROWS
) -> Tensor:
    """`cross_entropy_sum` of F.linear(hidden, weight, bias), and its gradients.

    Gradients are computed in forward, while a chunk's logits exist, and only scaled in backward, so
    no product is computed twice. The gradient of `weight` is summed in its dtype, with one rounding
    a chunk.

    torch 2.13 has `linear_cross_entropy`, which can do the same. It is not used, for three reasons:
    its sum of bfloat16 inputs is bfloat16, 8 bits for the loss of thousands of positions; a NaN in
    an ignored row still reaches loss and gradients; and torch 2.11 lacks it.

    Args:
        hidden: [P, D].
        weight: [V, D].
        bias: [V].
        labels: int64 [P]; a row with label IGNORED adds nothing, whatever it holds.
        chunk_rows: positions at a time.

    Returns:
        Scalar in nats: float32, or float64 where `hidden` is. It has one backward.
    """
    device = hidden.device.type
    inputs = (hidden, weight, bias)
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        inputs = (hidden.to(dtype), weight.to(dtype), bias.to(dtype))
    with torch.autocast(device, enabled=False):
        total: Tensor = _Chunked.apply(*inputs, labels, chunk_rows)  # type: ignore[no-untyped-call]
    return total


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, chunk_rows: int
    ) -> Tensor:
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        of_bias = torch.zeros_like(precise(bias))
        total = of_bias.new_zeros(())
        parts = (torch.split(each, chunk_rows) for each in (hidden, labels, of_hidden))
        for rows, own_labels, of_rows in zip(*parts, strict=True):
            # A NaN in an ignored row would survive the product with its zero gradient.
            used = rows.masked_fill((own_labels == IGNORED)[:, None], 0.0)
            log_probabilities = torch.log_softmax(precise(F.linear(used, weight, bias)), dim=-1)
            total += F.nll_loss(
                log_probabilities, own_labels, reduction="sum", ignore_index=IGNORED
            )
            of_logits = logits_gradient(log_probabilities, own_labels)
            of_bias += of_logits.sum(0)
            of_logits = of_logits.to(hidden.dtype)
            torch.mm(of_logits, weight, out=of_rows)
            of_weight.addmm_(of_logits.t(), used)
        ctx.save_for_backward(of_hidden, of_weight, of_bias.to(bias.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, of_bias = (each.mul_(grad) for each in ctx.saved_tensors)
        return of_hidden, of_weight, of_bias, None, None


def check_head(config: ModelSection) -> None:
    """Raise ConfigError if model.head is "chunked" in fp16."""
    if config.head == "chunked" and config.precision == "fp16":
        # Its gradients are rounded before the loss scale applies: most words get zero.
        raise ConfigError(
            "model.head",
            "'chunked' cannot keep small gradients in fp16",
            "use 'full', or set model.precision to 'bf16'",
        )


def masked_lm_loss(
    head: HeadName, blocks: Blocks, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
) -> Tensor:
    """Summed cross-entropy of hidden @ weight.T + bias, by the head that a config names.

    If that is "chunked", the logits [P, V] never exist all at once.
    """
    compute = blocks.masked_lm_loss if head == "full" else chunked_cross_entropy_sum
    return compute(hidden, weight, bias, labels)


class PretrainingLogits(NamedTuple):
    """Scores of both tasks: `mlm` [P, V], `nsp` [B, 2] (0: B follows A, 1: random).

    `nsp` is None if model.objective leaves it out.
    """

    mlm: Tensor
    nsp: Tensor | None


class LossSums(NamedTuple):
    """Sums of cross-entropies in nats, scalars of float32 (float64 where the logits are)."""

    mlm: Tensor  # over P masked positions
    nsp: Tensor | None  # over B sequences


class Pooler(nn.Module):
    """Projection of the first token's hidden state through tanh."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, device=META)

    def forward(self, first_tokens: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        return torch.tanh(self.dense(first_tokens))


class PredictionTransform(nn.Module):
    """Projection, GELU (erf) and LayerNorm before the decoder."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense = nn.Linear(hidden, hidden, device=META)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_epsilon, device=META)

    def forward(self, hidden: Tensor) -> Tensor:
        """[P, D] -> [P, D]."""
        transformed: Tensor = self.LayerNorm(F.gelu(self.dense(hidden)))
        return transformed


class MaskedLmHead(nn.Module):
    """Scores over the vocabulary; the decoder's matrix is the word embedding, passed in."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        self.transform = PredictionTransform(config)
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size, device=META))

    def forward(self, hidden: Tensor, word_embeddings: Tensor) -> Tensor:
        """Hidden states [P, D] of masked positions, matrix [V, D] -> logits [P, V]."""
        return F.linear(self.transform(hidden), word_embeddings, self.bias)


class PretrainingHeads(nn.Module):
    """Both tasks of BERT's pre-training (arXiv 1810.04805, section 3.1), or its masked LM alone."""

    def __init__(self, config: ModelSection, blocks: Blocks) -> None:
        super().__init__()
        self.predictions = MaskedLmHead(config)
        # No unused weights: a reducer would wait for their gradients, and decay would shrink them.
        self.seq_relationship: nn.Linear | None = None
        if config.objective == "mlm_nsp":
            self.seq_relationship = nn.Linear(config.hidden_size, 2, device=META)
        self.head: HeadName = config.head
        self.blocks = blocks

    def forward(
        self, masked: Tensor, pooled: Tensor | None, word_embeddings: Tensor
    ) -> PretrainingLogits:
        """Masked positions [P, D], pooled first tokens [B, D], decoder matrix [V, D] -> logits.

        Without next-sentence prediction `pooled` is None.
        """
        return PretrainingLogits(
            mlm=self.predictions(masked, word_embeddings), nsp=self._pair_scores(pooled)
        )

    def loss_sums(
        self, masked: Tensor, pooled: Tensor | None, word_embeddings: Tensor, batch: UnpaddedBatch
    ) -> LossSums:
        """`loss_sums` of the logits of the same arguments."""
        head = self.predictions
        factors = head.transform(masked), word_embeddings, head.bias
        return LossSums(
            mlm=masked_lm_loss(self.head, self.blocks, *factors, batch.labels),
            nsp=_pair_loss(self._pair_scores(pooled), batch),
        )

    def _pair_scores(self, pooled: Tensor | None) -> Tensor | None:
        if self.seq_relationship is None or pooled is None:
            return None
        scores: Tensor = self.seq_relationship(pooled)
        return scores


def loss_sums(logits: PretrainingLogits, batch: UnpaddedBatch) -> LossSums:
    """Summed cross-entropy of both tasks; zero, with a gradient, if P is zero."""
    return LossSums(
        mlm=cross_entropy_sum(logits.mlm, batch.labels),
        nsp=_pair_loss(logits.nsp, batch),
    )


def _pair_loss(scores: Tensor | None, batch: UnpaddedBatch) -> Tensor | None:
    return None if scores is None else cross_entropy_sum(scores, batch.next_sentence_label)


def pretraining_loss(sums: LossSums, batch: UnpaddedBatch) -> Tensor:
    """Scalar loss: each sum over its own denominator, the one of the whole update."""
    loss = sums.mlm / batch.mlm_denominator
    return loss if sums.nsp is None else loss + sums.nsp / batch.nsp_denominator


def correct_predictions(logits: PretrainingLogits, batch: UnpaddedBatch) -> Tensor:
    """Bool [P]: true if the label has the highest score (counted by MLPerf's masked-LM accuracy).

    A row with label IGNORED is false, whatever its logits hold.
    """
    return logits.mlm.argmax(dim=-1) == batch.labels
