"""Clip policies as pure functions of tensors: their mathematics, norms, limits and factors.

With N ranks, g_i the gradient of rank i, g_ib its part in bucket b, C = max_norm, and
limit(x, c) = x * min(1, c / ||x||) in the L2 norm:

- `none`: mean_i g_i
- `after_allreduce`: limit(mean_i g_i, C)
- `whole_before_allreduce`: mean_i limit(g_i, C)
- `bucket_before_allreduce`: mean_i limit(g_ib, C_b) in each bucket b, where
  `by_size`: C_b = C * sqrt(numel_b / numel_total), so that sum_b C_b^2 = C^2 whatever the plan of
  buckets; `equal_share`: C_b = C / sqrt(bucket_count), as published, with the count pinned because
  DistributedDataParallel starts with one bucket and its later number depends on dtype and layout.

With A forwards an update, g_i is their sum (`accumulated`), or each forward's gradient is limited
to C / A (C_b / A) before it is added (`each_forward`). Forwards are weighed by the loss, each about
1 / A, so this is the published mean of forwards limited to C each.

Sources: arXiv 2402.02447 (`bucket_before_allreduce`); MLPerf Training rules, BERT reference
(`after_allreduce`).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mlperf_bert.config.sections import CLIPPED_TOGETHER, ClipSection

_ROW = 1024


def clips_before(clip: ClipSection) -> bool:
    """Whether the policy clips what a rank sends, not what it received."""
    return clip.policy not in CLIPPED_TOGETHER


def limit_before_allreduce(clip: ClipSection, numel: int, numel_total: int) -> float:
    """The limit C or C_b of `numel` elements clipped together, of the model's `numel_total`."""
    if clip.policy == "whole_before_allreduce":
        return clip.max_norm
    if clip.bucket_limit == "equal_share":
        return clip.max_norm / math.sqrt(clip.bucket_count)
    return clip.max_norm * math.sqrt(numel / numel_total)


def limit_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / norm), exactly 1 where the norm is within the limit; 0-d as `norm`.

    NaN where the norm is not finite, so that the whole bucket becomes NaN: finite elements whose
    norm overflows would else turn to zeros, and the other ranks would not learn of it.
    """
    return torch.where(torch.isfinite(norm), max_norm / norm.clamp(min=max_norm), torch.nan)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm over all tensors together, 0-d, on their device; fp32 for 16-bit gradients."""
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    if gradients[0].device.type == "cpu":
        return combine_norms([_norm_on_cpu(each, dtype) for each in gradients])
    return combine_norms(torch._foreach_norm(list(gradients), 2, dtype))


def _norm_on_cpu(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    # In one sweep, fp32 loses digits on a CPU: 2e-4 of the norm at 8 million elements, 5e-3 at 67
    # million. The norm of rows' norms is within 2e-7, in the same time.
    flat = gradient.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([rows, rest.view(1)]))
    return norm


def combine_norms(norms: Sequence[Tensor]) -> Tensor:
    """The norm of a gradient from its parts' norms (0-d each): the root of their squares' sum."""
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack(list(norms))
    return torch.sqrt(torch.sum(stacked * stacked))
