"""The optimizer that a config names, built over flat buffers."""

from types import MappingProxyType

from torch import Tensor, nn

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import OptimSection
from mlperf_bert.optim.adamw import AdamW
from mlperf_bert.optim.apex_optimizer import ApexAdamW, ApexLAMB
from mlperf_bert.optim.flat_buffers import FlatBuffers, flat_weights
from mlperf_bert.optim.flat_layout import plan_layout
from mlperf_bert.optim.flat_optimizer import FlatOptimizer, NoOtherShards, OtherShards
from mlperf_bert.optim.flat_shard import Constants
from mlperf_bert.optim.lamb import LAMB
from mlperf_bert.optim.loss_scale import LossScale, no_loss_scale

# To add an optimizer: one line here, and its name in config.OptimSection.name.
OPTIMIZERS = MappingProxyType(
    {
        "adamw": AdamW,
        "lamb": LAMB,
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
    return make_optimizer(
        config, buffers, weights, buffers.gradients, NoOtherShards(), no_loss_scale(weights.device)
    )


def make_optimizer(
    config: OptimSection,
    buffers: FlatBuffers,
    initial: Tensor,
    gradients: Tensor,
    others: OtherShards,
    loss_scale: LossScale,
) -> FlatOptimizer:
    """The optimizer of `config.name`; the other arguments are `FlatOptimizer`'s.

    Raises ConfigError for a name that is not registered, and where apex is wanted and missing.
    """
    rules = BY_APEX if config.implementation == "apex" else OPTIMIZERS
    if config.name not in rules:
        known = ", ".join(rules)
        raise ConfigError("optim.name", f"no optimizer {config.name!r}", f"use one of {known}")
    constants = Constants(beta_1=config.beta_1, beta_2=config.beta_2, epsilon=config.epsilon)
    return rules[config.name](
        buffers, initial, gradients, others, loss_scale, constants, config.weight_decay
    )
