"""Makes the engine of a name, with this rank's part of the model."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bert_tools.squad.bubble import StageClock
from bert_tools.squad.engines.contract import Engine, Team
from bert_tools.squad.engines.pipeline import Pipelined, PipelineShape
from bert_tools.squad.engines.replicated import Replicated
from bert_tools.squad.microbatches import UpdatePlan
from bert_tools.squad.model import Part, SpanModel, make_part, parameter_shapes, whole
from bert_tools.squad.settings import SquadSettings
from bert_tools.squad.stages import balanced_split, layer_costs
from mlperf_bert.config.sections import ModelSection


def make_engine(
    settings: SquadSettings,
    model: ModelSection,
    weights: Mapping[str, Tensor],
    plan: UpdatePlan,
    team: Team,
    device: torch.device,
    clock: StageClock,
    dropout_seed: int,
) -> Engine:
    """The engine that `settings` name, ready for the first update.

    Args:
        settings: of the run.
        model: its dropout is what the model gets.
        weights: of the whole model, on the host.
        plan: of the run's updates; its mean length balances the stages.
        team: the engine's ranks.
        device: of this rank.
        clock: of a pipeline's stages.
        dropout_seed: of all dropout.

    Raises:
        ConfigError: more stages than layers.
    """
    name = settings.engine

    def part_of(part: Part) -> SpanModel:
        return make_part(model, part, weights, device, settings.precision, dropout_seed)

    if name.kind != "pipeline":
        return Replicated(name.kind, part_of(whole(model)), team)
    mean_length = float(plan.tokens.sum() / plan.windows.size)
    bounds = balanced_split(layer_costs(model, mean_length), name.num_parts)
    shape = PipelineShape(
        name, settings.microbatches // name.replicas, plan.capacity(settings.max_length), bounds
    )
    parts = [
        part_of(Part(bounds[number], bounds[number + 1], model.num_layers))
        for number in shape.stages_of(team.stage)
    ]
    return Pipelined(parts, shape, parameter_shapes(model), team, clock)
