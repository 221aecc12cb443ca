"""LAMB: the readable update of one tensor, and the optimizer.

Source: You et al., "Large Batch Optimization for Deep Learning" (arXiv 1904.00962), algorithm 2,
in MLPerf's form: bias-corrected moments, weight decay added to the update, epsilon outside the
square root, no layer adaptation of biases and LayerNorm. Gradient clipping is done elsewhere.
"""

import torch
from torch import Tensor

from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.optim.flat_shard import StepScalars


def lamb_update(
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
    layer_adaptation: bool,
) -> None:
    """One step of one tensor, in place on `param`, `exp_avg` and `exp_avg_sq`. The reference.

    Args:
        param, grad, exp_avg, exp_avg_sq: same shape and float dtype.
        step: this update's number, from 1.
        layer_adaptation: scale by ||param|| / ||update|| (1 where either norm is zero); if false
            the scale is 1.
    """
    exp_avg.mul_(beta_1).add_(grad, alpha=1 - beta_1)
    exp_avg_sq.mul_(beta_2).addcmul_(grad, grad, value=1 - beta_2)
    mean = exp_avg / (1 - beta_1**step)
    variance = exp_avg_sq / (1 - beta_2**step)
    update = mean / (variance.sqrt() + epsilon) + weight_decay * param
    if layer_adaptation:
        update.mul_(trust_ratio(param.norm(), update.norm()))
    param.sub_(lr * update)


def trust_ratio(param_norm: Tensor, update_norm: Tensor) -> Tensor:
    """||param|| / ||update||, or 1 where either is zero. Any shape, element by element."""
    usable = (param_norm > 0) & (update_norm > 0)
    return torch.where(usable, param_norm / update_norm, torch.ones_like(param_norm))


class LAMB(FlatOptimizer):
    """`lamb_update` of all tensors together, on flat buffers.

    A tensor's norms are added up over all shards that hold a part of it.
    """

    def update(self, scalars: StepScalars) -> None:
        """A bucket's weights travel while the next bucket is updated."""
        squares = self.kernels.lamb_norms(self.shard, self.constants, scalars)
        self.others.add_up(squares)
        weight_norms, update_norms = squares.sqrt().unbind(1)
        ratios = torch.where(self.shard.adapted, trust_ratio(weight_norms, update_norms), 1.0)
        for number, part, whole, piece in self.parts:
            self.kernels.lamb_apply(part, self.constants, scalars, ratios)
            self.others.publish(number, whole, piece)
