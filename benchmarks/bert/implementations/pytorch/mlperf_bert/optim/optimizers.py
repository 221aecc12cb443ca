"""Define AdamW and LAMB as functions and as classes, and create the optimizer of a config."""

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
    """Update one tensor and its moments in place by one step of AdamW.

    This function is the readable definition of the update, which the kernels compute faster.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101),
    algorithm 2, with bias correction and epsilon outside the square root.

    Args:
        param, grad, exp_avg, exp_avg_sq: tensors with the same shape and float dtype.
        step: number of this update, from 1.
        lr, beta_1, beta_2, epsilon, weight_decay: constants of the update rule.
    """
    exp_avg.mul_(beta_1).add_(grad, alpha=1 - beta_1)
    exp_avg_sq.mul_(beta_2).addcmul_(grad, grad, value=1 - beta_2)
    mean = exp_avg / (1 - beta_1**step)
    variance = exp_avg_sq / (1 - beta_2**step)
    param.mul_(1 - lr * weight_decay)
    param.sub_(lr * mean / (variance.sqrt() + epsilon))


class AdamW(FlatOptimizer):
    """The AdamW optimizer, which runs `adamw_update` on all tensors of the model's flat buffers."""

    def update(self, scalars: StepScalars) -> None:
        """Update the shard one bucket at a time.

        The new weights of a bucket are sent while the next bucket is updated.
        """
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
    """Update one tensor and its moments in place by one step of LAMB.

    This function is the readable definition of the update, which the kernels compute faster.

    Source: You et al., "Large Batch Optimization for Deep Learning" (arXiv 1904.00962), algorithm
    2, in MLPerf's form. The moments are bias-corrected, and epsilon is outside the square root.
    Weight decay is added to the update. Biases and LayerNorm have no layer adaptation. The
    gradients must already be clipped.

    Args:
        param, grad, exp_avg, exp_avg_sq: tensors with the same shape and float dtype.
        step: number of this update, from 1.
        lr, beta_1, beta_2, epsilon, weight_decay: constants of the update rule.
        layer_adaptation: whether to scale the update by `trust_ratio`.
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
    """Return ||param|| / ||update|| element-wise, or 1 if one of the norms is zero."""
    usable = (param_norm > 0) & (update_norm > 0)
    return torch.where(usable, param_norm / update_norm, torch.ones_like(param_norm))


class LAMB(FlatOptimizer):
    """The LAMB optimizer, which runs `lamb_update` on all tensors of the model's flat buffers.

    The squared norms of a tensor are summed over all shards that contain a part of the tensor.
    """

    def update(self, scalars: StepScalars) -> None:
        """Update the shard one bucket at a time.

        The new weights of a bucket are sent while the next bucket is updated.
        """
        squares = self.kernels.lamb_norms(self.shard, self.constants, scalars)
        self.others.add_up(squares)
        weight_norms, update_norms = squares.sqrt().unbind(1)
        ratios = torch.where(self.shard.adapted, trust_ratio(weight_norms, update_norms), 1.0)
        for number, part, whole, piece in self.parts:
            self.kernels.lamb_apply(part, self.constants, scalars, ratios)
            self.others.publish(number, whole, piece)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Divide parameters into two groups, the first with weight decay and the second without.

    The parameters of a group have the order of the model. Biases and LayerNorm parameters have
    neither weight decay nor layer adaptation (MLPerf Training rules, BERT optimizer). The key
    `layer_adaptation` of a group is separate from its weight decay, so that LAMB uses the trust
    ratio even if `weight_decay` is 0. AdamW ignores this key. BERT's query, key and value are
    separate tensors, because LAMB has one trust ratio per tensor. In ModernBERT they are one tensor
    with one ratio, as published.
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


# To add an optimizer, add a line here, and its name in config.OptimSection.name.
OPTIMIZERS: Mapping[str, type[FlatOptimizer]] = MappingProxyType(
    {
        "adamw": AdamW,
        "lamb": LAMB,
        "muon": Muon,
    }
)
BY_APEX = MappingProxyType({"adamw": ApexAdamW, "lamb": ApexLAMB})


def make_optimizer_alone(config: OptimSection, model: nn.Module) -> FlatOptimizer:
    """Create the optimizer of a model on one rank, without data parallelism.

    The optimizer's state has the dtype of the model.
    """
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    shapes = {name: tuple(param.shape) for name, param in trained.items()}
    layout = plan_layout(shapes, [list(shapes)], num_shards=1)
    weights = flat_weights(model, layout)
    buffers = FlatBuffers(model, layout, weights)
    group = ShardGroup(RankInfo(0, 1, 0, 1, 0, "single"), 1, weights.device)
    return make_optimizer(config, buffers, weights, buffers.gradients, group)


def make_optimizer(
    config: OptimSection,
    buffers: FlatBuffers,
    initial: Tensor,
    gradients: Tensor,
    others: ShardGroup,
) -> FlatOptimizer:
    """Create the optimizer that the config selects. `FlatOptimizer` explains the other arguments.

    Raises ConfigError if the name is unknown, or if the config needs apex and apex is not
    installed.
    """
    rules = BY_APEX if config.implementation == "apex" else OPTIMIZERS
    if config.name not in rules:
        known = ", ".join(rules)
        raise ConfigError("optim.name", f"unknown optimizer {config.name!r}", f"use one of {known}")
    constants = Constants(beta_1=config.beta_1, beta_2=config.beta_2, epsilon=config.epsilon)
    kernels = _kernels_for(initial.device)
    return rules[config.name](
        buffers, initial, gradients, others, constants, config.weight_decay, kernels
    )


def _kernels_for(device: torch.device) -> Kernels:
    if device.type == "cuda":
        problem = why_triton_cannot_compile()
        if problem is not None:
            problem = f"training on 'cuda' needs Triton, but {problem}"
            remedy = "install what is missing, or set run.device to 'cpu'"
            raise ConfigError("run.device", problem, remedy)
        from mlperf_bert.optim import triton_kernels  # torch without CUDA comes without triton

        return triton_kernels
    from mlperf_bert.optim import cpu_kernels

    return cpu_kernels
