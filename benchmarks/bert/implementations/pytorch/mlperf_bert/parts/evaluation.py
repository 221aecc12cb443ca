"""A config's held-out set and model become an evaluator, and the schedule that calls it."""

import torch

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.evaluation.batches import tokens_per_forward
from mlperf_bert.evaluation.evaluate import Evaluator
from mlperf_bert.evaluation.schedule import Beside, EvalSchedule, InTurn
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.run.mlperf_log import MlperfLog


def make_evaluator(
    config: RunConfig,
    index: LengthIndex,
    reader: SampleReader,
    info: RankInfo,
    device: torch.device,
) -> Evaluator:
    """The evaluator of this rank."""
    return Evaluator(
        index,
        reader,
        tokens_per_forward=tokens_per_forward(
            config.eval.tokens_per_forward, index, config.parallel.world_size, device
        ),
        rank=info.rank,
        world_size=info.world_size,
        device=device,
        precision=config.model.precision,
        step_mode=config.run.step_mode,
    )


def make_schedule(
    config: RunConfig,
    evaluator: Evaluator,
    model: BertForPretraining,
    optimizer: FlatOptimizer,
    log: MlperfLog,
) -> EvalSchedule:
    """When `model` is evaluated; it is in the dtype and on the device that it is trained in."""
    if config.eval.overlap == "none":
        return InTurn(evaluator, model, optimizer.settle, log)
    weights = next(model.parameters())
    snapshot = BertForPretraining(config.model, weights.device, attention=model.attention)
    snapshot.to(weights.dtype)
    return Beside(evaluator, model, snapshot, optimizer.settle, log)
