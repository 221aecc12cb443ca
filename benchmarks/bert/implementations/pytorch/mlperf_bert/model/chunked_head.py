"""Linear layer and summed cross-entropy, some rows at a time, so that no full logits exist.

torch 2.13 has `linear_cross_entropy`, which can do the same. It is not used: it returns a bfloat16
sum of bfloat16 inputs, 8 bits of the loss of thousands of positions; rows whose label is ignored
still turn loss and gradients into NaN where they hold one; and torch 2.11 has none.

Shape letters: P positions, D hidden, V classes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlperf_bert.data.batch import IGNORED
from mlperf_bert.model.cross_entropy import logits_gradient, precise

CHUNK_ROWS = 1024  # at V 30,528 125 MB of float32 for logits, where 17,000 positions need 2 GB


def chunked_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, chunk_rows: int = CHUNK_ROWS
) -> Tensor:
    """`cross_entropy_sum` of F.linear(hidden, weight, bias), and its gradients.

    Gradients are computed in forward, while a chunk's logits are there, and only scaled in
    backward: no product is computed twice. That of `weight` is added up in its dtype, a rounding
    a chunk.

    Args:
        hidden: [P, D].
        weight: [V, D].
        bias: [V].
        labels: int64 [P], IGNORED where the row adds nothing, whatever it holds.
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
            # A NaN in a row that is ignored would come through the product with its zero gradient.
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
