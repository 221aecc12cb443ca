"""Clip policies: which gradient norm is limited, and where relative to the all-reduce."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlperf_bert.config import ClipSection

ClipPolicy = Callable[[Sequence[Tensor]], Tensor]


def clip_after_allreduce(gradients: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale the averaged gradients g by max_norm / max(max_norm, ||g||) in place; return ||g||.

    ||g|| is the L2 norm over all tensors together (0-d, of the gradients' dtype). The exact global
    norm, and the MLPerf reference's semantics; it has to wait for every byte of the all-reduce.
    """
    norm = gradient_norm(gradients)
    torch._foreach_mul_(list(gradients), max_norm / norm.clamp(min=max_norm))
    return norm


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm over all tensors together, 0-d, left on their device."""
    norms = torch.stack(torch._foreach_norm(list(gradients)))
    return torch.sqrt(torch.sum(norms * norms))


def make_clip_policy(config: ClipSection) -> ClipPolicy:
    """The policy of a config: gradients after the all-reduce in, their norm before clipping out."""
    if config.policy == "none":
        return gradient_norm
    return lambda gradients: clip_after_allreduce(gradients, config.max_norm)
