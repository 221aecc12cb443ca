"""Splits a model's parameters into those that weight decay acts on and those it does not."""

from typing import Any

from torch import nn


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups, decayed first, each in the model's parameter order.

    Biases and LayerNorm parameters are neither decayed nor layer-adapted (MLPerf Training rules,
    BERT optimizer). `layer_adaptation` says the second explicitly, so that a run with
    `weight_decay = 0` does not lose LAMB's trust ratio; AdamW ignores it. Query, key and value
    stay separate tensors, because LAMB's trust ratio is per tensor.
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


def is_exempt(name: str) -> bool:
    """Whether the parameter of this dotted name takes no decay: a bias, or part of a LayerNorm."""
    return name.endswith("bias") or "LayerNorm" in name
