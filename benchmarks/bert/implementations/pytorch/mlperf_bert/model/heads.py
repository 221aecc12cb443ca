"""Masked-LM and next-sentence heads, and the loss and accuracy of their logits.

Shape letters: B sequences, D hidden, V vocabulary (padded to a multiple of 8), P masked positions.

Padding words are ordinary words: their rows are trained and their logits take part in the softmax,
as in `transformers` built with vocab_size = V. No label ever names one.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.model.blocks import Blocks, cross_entropy_sum
from mlperf_bert.model.layers import META


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
            mlm=self.blocks.masked_lm_loss(*factors, batch.labels),
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
