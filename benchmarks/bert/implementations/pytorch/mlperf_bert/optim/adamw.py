"""AdamW: the readable update of one tensor, and the optimizer.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101),
algorithm 2, with bias correction and epsilon outside the square root.
"""

from torch import Tensor

from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.optim.flat_shard import StepScalars


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


class AdamW(FlatOptimizer):
    """`adamw_update` of all tensors together, on flat buffers."""

    def update(self, scalars: StepScalars) -> None:
        """A bucket's weights travel while the next bucket is updated."""
        for number, part, whole, piece in self.parts:
            self.kernels.adamw(part, self.constants, scalars)
            self.others.publish(number, whole, piece)
