"""AdamW: the readable update of one tensor, and an optimizer that runs torch's fused kernel.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101),
algorithm 2, with bias correction and epsilon outside the square root.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def adamw_update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
) -> None:
    """One step of one tensor, in place on `param`, `exp_avg` and `exp_avg_sq`. The reference.

    Args:
        param, grad, exp_avg, exp_avg_sq: same shape and float dtype.
        step: this update's number, from 1.
    """
    exp_avg.mul_(beta_1).add_(grad, alpha=1 - beta_1)
    exp_avg_sq.mul_(beta_2).addcmul_(grad, grad, value=1 - beta_2)
    mean = exp_avg / (1 - beta_1**step)
    variance = exp_avg_sq / (1 - beta_2**step)
    param.mul_(1 - lr * weight_decay)
    param.sub_(lr * mean / (variance.sqrt() + epsilon))


class AdamW(torch.optim.AdamW):
    """`adamw_update` over all parameters in one fused kernel, on CPU and CUDA.

    The state of a parameter is `step` (0-d float32), `exp_avg` and `exp_avg_sq`. Set
    `param_groups[i]["lr"]` before a step to follow a schedule.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        weight_decay: float,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=(beta_1, beta_2),
            eps=epsilon,
            weight_decay=weight_decay,
            fused=True,
        )
