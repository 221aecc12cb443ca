"""Summed cross-entropy of logits in one buffer; labels of unused slots are left out.

Shape letters: P positions, V classes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlperf_bert.data.batch import IGNORED


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """F.cross_entropy(logits, labels, reduction="sum"), whatever the ignored rows hold.

    Args:
        logits: [P, V], floating dtype.
        labels: int64 [P], IGNORED where the row adds nothing to loss and gradients, be it NaN.

    Returns:
        Scalar in nats: float32, or float64 where the logits are. It has one backward and no second
        derivative.
    """
    total: Tensor = _CrossEntropySum.apply(precise(logits), labels)  # type: ignore[no-untyped-call]
    return total


def precise(logits: Tensor) -> Tensor:
    """Float64 as it is, all else in float32.

    bf16 keeps 8 bits of mantissa: a log-sum-exp over 30,000 words needs float32 at least.
    """
    return logits if logits.dtype == torch.float64 else logits.float()


def logits_gradient(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Of the sum, in place of the log-probabilities [P, V]; rows of ignored labels are zero."""
    gradient = log_probabilities.exp_()  # of log-sum-exp: the softmax
    gradient.scatter_add_(1, labels.clamp(min=0)[:, None], -gradient.new_ones(len(labels), 1))
    # Multiplied by zero a NaN would stay, and on a CPU a masked fill takes six times as long.
    integers = torch.int64 if gradient.dtype == torch.float64 else torch.int32
    all_bits = (labels != IGNORED).to(integers).neg_()[:, None]
    gradient.view(integers).bitwise_and_(all_bits)
    return gradient


class _CrossEntropySum(torch.autograd.Function):
    """The saved log-probabilities become the gradient in place: no new [P, V] in backward.

    Memory that is new to the process is slow on a CPU: at P 600, V 30,528 a step of 2 layers,
    hidden 128 takes a tenth less time.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        log_probabilities = torch.log_softmax(logits, dim=-1)
        ctx.save_for_backward(log_probabilities, labels)
        return F.nll_loss(log_probabilities, labels, reduction="sum", ignore_index=IGNORED)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        log_probabilities, labels = ctx.saved_tensors
        return logits_gradient(log_probabilities, labels).mul_(grad), None
