"""The dtype and the scale in which gradients travel between ranks.

fp16 holds 6e-5 to 65,504 at full precision: gradients are scaled into that range before they travel
and back in the optimizer's update. By what:

- where a policy clips before the all-reduce, the sum's norm is at most max_norm: the largest power
  of two that keeps it at or below 2^15, so that no element can overflow;
- else by the loss scale, or by 2^10 where the loss is not scaled. A sum that overflows then shows
  in the norm, and the step is skipped.

The sums over ranks themselves: docs/numerics.md, "Summing gradients in 16 bits".
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mlperf_bert.config.sections import AllreduceDtype, ClipSection
from mlperf_bert.distributed.clip_policies import clips_before

UNSCALED_LOSS_EXPONENT = 10
LARGEST_SUM_EXPONENT = 15
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Wire:
    """How one rank's gradients become what it sends.

    They come multiplied by `loss_scale`; the reduced ones are multiplied by `scale`. Both are 0-d
    float32, on the device. `dtype` is None where they travel as they are.
    """

    dtype: torch.dtype | None
    loss_scale: Tensor
    scale: Tensor


def make_wire(
    clip: ClipSection,
    gradient_dtype: torch.dtype,
    allreduce_dtype: AllreduceDtype,
    loss_scale: Tensor,
) -> Wire:
    """The wire of a config, for gradients of `gradient_dtype`."""
    named = None if allreduce_dtype == "as_gradients" else DTYPES[allreduce_dtype]
    dtype = None if named == gradient_dtype else named
    if torch.float16 not in (gradient_dtype, dtype):
        scale = torch.ones_like(loss_scale)
    elif clips_before(clip):
        exponent = LARGEST_SUM_EXPONENT - math.ceil(math.log2(clip.max_norm))
        scale = torch.full_like(loss_scale, 2.0**exponent)
    elif gradient_dtype == torch.float16:
        scale = loss_scale
    else:
        scale = torch.full_like(loss_scale, 2.0**UNSCALED_LOSS_EXPONENT)
    return Wire(dtype, loss_scale, scale)


def plain_wire(device: torch.device) -> Wire:
    """Gradients travel as they are, of a loss that is not scaled."""
    one = torch.ones((), dtype=torch.float32, device=device)
    return Wire(None, one, one)


def multiply(gradient: Tensor, factor: Tensor, out: Tensor) -> None:
    """`out` = `gradient` * `factor`; `out` may be `gradient`, or have another dtype.

    `factor` is 0-d, float32 or float64. 16-bit gradients are multiplied in float32 and rounded
    once: a 0-d factor alone would be rounded to their dtype first, where 1 / 1,024 of a small limit
    may be subnormal.
    """
    if gradient.dtype == factor.dtype == out.dtype:
        torch.mul(gradient, factor, out=out)
    else:
        torch.mul(gradient.view(-1), factor.view(1), out=out.view(-1))
