"""The optimizer that a config names, built over a model's parameter groups."""

from types import MappingProxyType

import torch
from torch import nn

from mlperf_bert.config import OptimSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.optim.adamw import AdamW
from mlperf_bert.optim.lamb import LAMB
from mlperf_bert.optim.param_groups import param_groups

# To add an optimizer: one line here, and its name in config.OptimSection.name.
OPTIMIZERS = MappingProxyType(
    {
        "adamw": AdamW,
        "lamb": LAMB,
    }
)


def make_optimizer(model: nn.Module, config: OptimSection) -> torch.optim.Optimizer:
    """The optimizer of `config.name` over `param_groups(model)`.

    Its learning rate starts at `config.learning_rate`; the train loop sets it before each step.
    Raises ConfigError for a name that is not registered.
    """
    if config.name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ConfigError("optim.name", f"no optimizer {config.name!r}", f"use one of {known}")
    return OPTIMIZERS[config.name](
        param_groups(model, config.weight_decay),
        lr=config.learning_rate,
        beta_1=config.beta_1,
        beta_2=config.beta_2,
        epsilon=config.epsilon,
        weight_decay=config.weight_decay,
    )
