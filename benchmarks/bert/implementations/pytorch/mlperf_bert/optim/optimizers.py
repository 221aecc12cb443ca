"""AdamW and LAMB: readable updates of one tensor, the optimizers, and the choice by config."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from mlperf_bert.compiled import why_triton_cannot_compile
from mlperf_bert.config.sections import OptimSection
from mlperf_bert.distributed.bucket_plan import plan_layout
from mlperf_bert.distributed.flat_reducer import FlatBuffers, ShardGroup, flat_weights
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.errors import ConfigError
from mlperf_bert.optim.apex_optimizer import ApexAdamW, ApexLAMB
from mlperf_bert.optim.flat_optimizer import (
    Constants,
    FlatOptimizer,
    Kernels,
    StepScalars,
    is_exempt,
)
from mlperf_bert.optim.muon import Muon


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

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101),
    algorithm 2, with bias correction and epsilon outside the square root.

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
        """Update bucket by bucket; a bucket's weights travel while the next is updated."""
        for number, part, whole, piece in self.parts:
            self.kernels.adamw(part, self.constants, scalars)
            self.others.publish(number, whole, piece)


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

    Source: You et al., "Large Batch Optimization for Deep Learning" (arXiv 1904.00962), algorithm
    2, in MLPerf's form: bias-corrected moments, weight decay added to the update, epsilon outside
    the square root, no layer adaptation of biases and LayerNorm. Clipping is done elsewhere.

    Args:
        param, grad, exp_avg, exp_avg_sq: same shape and float dtype.
        step: this update's number, from 1.
        layer_adaptation: scale by ||param|| / ||update|| (1 if either norm is zero); if false the
            scale is 1.
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
        """Update bucket by bucket; a bucket's weights travel while the next is updated."""
        squares = self.kernels.lamb_norms(self.shard, self.constants, scalars)
        self.others.add_up(squares)
        weight_norms, update_norms = squares.sqrt().unbind(1)
        ratios = torch.where(self.shard.adapted, trust_ratio(weight_norms, update_norms), 1.0)
        for number, part, whole, piece in self.parts:
            self.kernels.lamb_apply(part, self.constants, scalars, ratios)
            self.others.publish(number, whole, piece)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups, decayed first, each in the model's parameter order.

    Biases and LayerNorm parameters are neither decayed nor layer-adapted (MLPerf Training rules,
    BERT optimizer). `layer_adaptation` states the second explicitly, so that a run with
    `weight_decay = 0` does not lose LAMB's trust ratio; AdamW ignores it. Query, key and value stay
    separate tensors, because LAMB's trust ratio is per tensor. ModernBERT's are one tensor as
    published, with one ratio.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (exempt if is_exempt(name) else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay, "layer_adaptation": True},
        {"params": exempt, "weight_decay": 0.0, "layer_adaptation": False},
    ]


# To add an optimizer: a line here, and its name in config.OptimSection.name.
OPTIMIZERS: Mapping[str, type[FlatOptimizer]] = MappingProxyType(
    {
        "adamw": AdamW,
        "lamb": LAMB,
        "muon": Muon,
    }
)
BY_APEX = MappingProxyType({"adamw": ApexAdamW, "lamb": ApexLAMB})


def make_optimizer_alone(config: OptimSection, model: nn.Module) -> FlatOptimizer:
    """The optimizer of a bare model on one rank, in the model's own dtype."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    shapes = {name: tuple(each.shape) for name, each in trained.items()}
    layout = plan_layout(shapes, [list(shapes)], num_shards=1)
    weights = flat_weights(model, layout)
    buffers = FlatBuffers(model, layout, weights)
    alone = ShardGroup(RankInfo(0, 1, 0, 1, 0, "single"), 1, weights.device)
    return make_optimizer(config, buffers, weights, buffers.gradients, alone)


def make_optimizer(
    config: OptimSection,
    buffers: FlatBuffers,
    initial: Tensor,
    gradients: Tensor,
    others: ShardGroup,
) -> FlatOptimizer:
    """The optimizer of `config.name`; the other arguments are `FlatOptimizer`'s.

    Raises ConfigError if the name is not registered, or apex is wanted and missing.
    """
    rules = BY_APEX if config.implementation == "apex" else OPTIMIZERS
    if config.name not in rules:
        known = ", ".join(rules)
        raise ConfigError("optim.name", f"no optimizer {config.name!r}", f"use one of {known}")
    constants = Constants(beta_1=config.beta_1, beta_2=config.beta_2, epsilon=config.epsilon)
    kernels = _kernels_for(initial.device)
    return rules[config.name](
        buffers, initial, gradients, others, constants, config.weight_decay, kernels
    )


def _kernels_for(device: torch.device) -> Kernels:
    if device.type == "cuda":
        problem = why_triton_cannot_compile()
        if problem is not None:
            remedy = "install that, or set run.device to 'cpu'"
            raise ConfigError("run.device", f"training on 'cuda' needs Triton: {problem}", remedy)
        from mlperf_bert.optim import triton_kernels  # builds without CUDA have no triton

        return triton_kernels
    from mlperf_bert.optim import cpu_kernels

    return cpu_kernels
