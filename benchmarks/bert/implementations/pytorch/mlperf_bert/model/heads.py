"""Masked-LM and next-sentence heads, and the loss and accuracy of their logits.

Shape letters: B sequences, D hidden, V vocabulary (padded to a multiple of 8), P masked positions.

The padded words are ordinary ones: their rows are trained and their logits take part in the
softmax, as in `transformers` built with vocab_size = V. No label ever names one.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlperf_bert.config import ModelSection
from mlperf_bert.data.batch import UnpaddedBatch


class PretrainingLogits(NamedTuple):
    """Scores of both tasks: `mlm` [P, V], `nsp` [B, 2] (0: B follows A, 1: random)."""

    mlm: Tensor
    nsp: Tensor


class LossSums(NamedTuple):
    """Sums of cross-entropies in nats, scalars of float32 (float64 where the logits are)."""

    mlm: Tensor  # over P masked positions
    nsp: Tensor  # over B sequences


class Pooler(nn.Module):
    """tanh projection of the first token's hidden state."""

    def __init__(self, config: ModelSection, device: torch.device) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, device=device)

    def forward(self, first_tokens: Tensor) -> Tensor:
        """[B, D] -> [B, D]."""
        return torch.tanh(self.dense(first_tokens))


class PredictionTransform(nn.Module):
    """dense, GELU (erf), LayerNorm before the decoder."""

    def __init__(self, config: ModelSection, device: torch.device) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dense = nn.Linear(hidden, hidden, device=device)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_epsilon, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        """[P, D] -> [P, D]."""
        transformed: Tensor = self.LayerNorm(F.gelu(self.dense(hidden)))
        return transformed


class MaskedLmHead(nn.Module):
    """Scores over the vocabulary; the decoder's matrix is the word embedding, passed in."""

    def __init__(self, config: ModelSection, device: torch.device) -> None:
        super().__init__()
        self.transform = PredictionTransform(config, device)
        self.bias = nn.Parameter(torch.empty(config.padded_vocab_size, device=device))

    def forward(self, hidden: Tensor, word_embeddings: Tensor) -> Tensor:
        """Hidden states [P, D] of masked positions, matrix [V, D] -> logits [P, V]."""
        return F.linear(self.transform(hidden), word_embeddings, self.bias)


class PretrainingHeads(nn.Module):
    """Both tasks of BERT's pre-training (arXiv 1810.04805, section 3.1)."""

    def __init__(self, config: ModelSection, device: torch.device) -> None:
        super().__init__()
        self.predictions = MaskedLmHead(config, device)
        self.seq_relationship = nn.Linear(config.hidden_size, 2, device=device)

    def forward(self, masked: Tensor, pooled: Tensor, word_embeddings: Tensor) -> PretrainingLogits:
        """Masked positions [P, D], pooled first tokens [B, D], decoder matrix [V, D] -> logits."""
        return PretrainingLogits(
            mlm=self.predictions(masked, word_embeddings), nsp=self.seq_relationship(pooled)
        )


def loss_sums(logits: PretrainingLogits, batch: UnpaddedBatch) -> LossSums:
    """Summed cross-entropy of both tasks; zero, with a gradient, where P is zero."""
    return LossSums(
        mlm=_cross_entropy_sum(logits.mlm, batch.labels),
        nsp=_cross_entropy_sum(logits.nsp, batch.next_sentence_label),
    )


def pretraining_loss(sums: LossSums, batch: UnpaddedBatch) -> Tensor:
    """Scalar loss: each sum over its own denominator, the one of the whole update."""
    return sums.mlm / batch.mlm_denominator + sums.nsp / batch.nsp_denominator


def correct_predictions(logits: PretrainingLogits, batch: UnpaddedBatch) -> Tensor:
    """Bool [P]: the highest score is the label's (MLPerf's masked-LM accuracy counts these)."""
    return logits.mlm.argmax(dim=-1) == batch.labels


def _cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    # bf16 keeps 8 bits of mantissa: a log-sum-exp over 30,000 words needs float32 at least.
    precise = logits if logits.dtype == torch.float64 else logits.float()
    total: Tensor = _CrossEntropySum.apply(precise, labels)  # type: ignore[no-untyped-call]
    return total


class _CrossEntropySum(torch.autograd.Function):
    """F.cross_entropy(logits, labels, reduction="sum") with a backward that needs no new [P, V].

    The saved log-probabilities become the gradient in place, so there is one backward and no second
    derivative. Memory that is new to the process is slow on a CPU: at P 600, V 30,528 a step
    of 2 layers, hidden 128 takes a tenth less time.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        log_probabilities = torch.log_softmax(logits, dim=-1)
        ctx.save_for_backward(log_probabilities, labels)
        return F.nll_loss(log_probabilities, labels, reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        log_probabilities, labels = ctx.saved_tensors
        gradient = log_probabilities.exp_().mul_(grad)  # of log-sum-exp: the softmax
        gradient.scatter_add_(1, labels[:, None], -grad.expand(len(labels), 1))
        return gradient, None
