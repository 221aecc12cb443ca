"""A config becomes parts: the only file that knows all classes.

No training or evaluation sample is read here: only the vocabulary's digest, sidecars and index.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from mlperf_bert.checkpoint.resume import NEW_RUN, Start, check_data
from mlperf_bert.checkpoint.saving import Saving
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.health import Health
from mlperf_bert.common.seeds import choose_seed
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.loader import Loader
from mlperf_bert.data.open_data import RunData, open_data
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.reader_roles import MpiProcess
from mlperf_bert.distributed.session import on_every_rank
from mlperf_bert.evaluation.evaluate import Evaluator
from mlperf_bert.evaluation.schedule import EvalSchedule
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.tensor_names import tensorflow_name
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.parts.evaluation import make_evaluator, make_schedule
from mlperf_bert.parts.loader import build_loader, make_planner
from mlperf_bert.parts.memory_plan import forward_of_run
from mlperf_bert.parts.start import (
    Origin,
    begin_training,
    check_memory,
    make_identity,
    make_model,
    make_writer,
    start_log,
    start_metrics_file,
    start_reporter,
)
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.run.metrics import Metrics
from mlperf_bert.run.metrics_file import MetricsFile
from mlperf_bert.run.mlperf_log import MlperfLog
from mlperf_bert.run.progress import Reporter
from mlperf_bert.run.stragglers import StragglerWatch
from mlperf_bert.signals.stop_request import StopRequest
from mlperf_bert.signals.whereabouts import Whereabouts
from mlperf_bert.step.captured import use_capturable_stream
from mlperf_bert.step.eager import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Everything the loop needs, each built for this rank."""

    config: RunConfig
    start: Start
    seed: int
    info: RankInfo
    device: torch.device
    directory: RunDirectory
    whereabouts: Whereabouts
    model: BertForPretraining
    optimizer: FlatOptimizer
    step: Step
    loader: Loader
    evaluator: Evaluator
    evaluation: EvalSchedule
    stop: StopRequest
    stragglers: StragglerWatch
    metrics: Metrics
    metrics_file: MetricsFile
    health: Health
    saving: Saving
    reporter: Reporter
    log: MlperfLog


def build(
    config: RunConfig,
    data_dir: Path,
    directory: RunDirectory,
    info: RankInfo,
    device: torch.device,
    init_checkpoint: Path | None,
    process: MpiProcess | None = None,
    cache_cleared: bool = False,
    start: Start = NEW_RUN,
    whereabouts: Whereabouts | None = None,
) -> Parts:
    """Build this rank's parts; the process group exists already. Raises on contradictions.

    Weights are those of `init_checkpoint`, where the run does not go on from where it was saved
    (`start`). `whereabouts` is for the loop to keep up to date; `process` is this rank among
    trainers and readers, where there are readers; `cache_cleared` goes into the log.
    """
    _check_world_size(config, info)
    if config.run.step_mode == "captured":
        use_capturable_stream(device)
    seed = _common_seed(config, start, info, device)
    data = on_every_rank(info, lambda: open_data(config, data_dir, info.rank))
    identity = make_identity(seed, data, info)
    on_every_rank(info, lambda: check_data(start, identity.data_sha256, data_dir))
    planner = make_planner(config, data.train, seed)
    loader, shapes = build_loader(
        config, planner, data.train_reader, seed, info, device, process, start.step + 1
    )
    on_every_rank(
        info, lambda: check_memory(config, device, lambda: forward_of_run(config, shapes))
    )
    vocabulary = data.train_reader.set_dir / data.train.manifest.vocabulary_file
    continues = start.continues
    with directory.begun(config, seed, info, device, vocabulary=vocabulary, continues=continues):
        origin = Origin(config, identity, start, init_checkpoint, cache_cleared)
        log = on_every_rank(info, lambda: start_log(origin, directory, info))
        reporter = start_reporter(directory, info, config, data, planner, start)
        return _assemble(
            origin, data, loader, shapes, directory, info, device, whereabouts, log, reporter
        )


def _assemble(
    origin: Origin,
    data: RunData,
    loader: Loader,
    shapes: tuple[StaticShape, ...],
    directory: RunDirectory,
    info: RankInfo,
    device: torch.device,
    whereabouts: Whereabouts | None,
    log: MlperfLog,
    reporter: Reporter,
) -> Parts:
    """Model, step, evaluation and saving, around what reads the data and what tells of the run."""
    config, identity, start = origin.config, origin.identity, origin.start
    model = make_model(config, identity.seed, device)
    reporter.line(model.attention.note)
    log.weights_initialization(map(tensorflow_name, model.state_dict()))
    optimizer, step = begin_training(origin, model, info, device, shapes)
    evaluator = make_evaluator(config, data.held_out, data.held_out_reader, info, device)
    evaluation = make_schedule(config, evaluator, model, optimizer, log)
    metrics, health = Metrics(config, info.world_size, device), _make_health(data)
    return Parts(
        config=config,
        start=start,
        seed=identity.seed,
        info=info,
        device=device,
        directory=directory,
        whereabouts=whereabouts or Whereabouts(),
        model=model,
        optimizer=optimizer,
        step=step,
        loader=loader,
        evaluator=evaluator,
        evaluation=evaluation,
        stop=StopRequest(info.world_size, device),
        stragglers=StragglerWatch(config.run, info, model, device),
        metrics=metrics,
        metrics_file=start_metrics_file(directory, info, start),
        health=health,
        saving=Saving(
            config=config,
            identity=identity,
            start=start,
            writer=make_writer(origin, directory, model, optimizer, info, device),
            metrics=metrics,
            health=health,
            reporter=reporter,
            write_outcome=partial(directory.write_outcome, info),
        ),
        reporter=reporter,
        log=log,
    )


def in_words(parts: Parts) -> str:
    """The run in one line, for the person who started it."""
    num_parameters = sum(parameter.numel() for parameter in parts.model.parameters())
    ranks = f"{parts.info.world_size} rank{'s' if parts.info.world_size > 1 else ''}"
    return (
        f"{num_parameters:,} parameters, {ranks} on {parts.device.type}, global batch "
        f"{parts.config.parallel.global_batch_size}, seed {parts.seed}, in {parts.directory.run}"
    )


def _make_health(data: RunData) -> Health:
    baseline = data.held_out.manifest.baseline
    return Health(None if baseline is None else baseline.masked_tokens)


def _common_seed(config: RunConfig, start: Start, info: RankInfo, device: torch.device) -> int:
    """One seed for all ranks: that of a resumed run, or rank 0's, where it is drawn at random."""
    if start.seed is not None:
        return start.seed
    seed = torch.tensor(choose_seed(config.run.seed), dtype=torch.int64, device=device)
    if info.world_size > 1:
        dist.broadcast(seed, src=0)
    return int(seed.item())  # host sync, once, before the clock starts


def _check_world_size(config: RunConfig, info: RankInfo) -> None:
    """Raise ConfigError unless as many ranks were started as the config asks for."""
    parallel = config.parallel
    if parallel.world_size != info.world_size:
        raise ConfigError(
            "parallel.ranks_per_node",
            f"the config asks for {parallel.nodes} x {parallel.ranks_per_node} ranks, "
            f"{info.world_size} were started ({info.launcher})",
            "start that many, or change parallel.nodes and parallel.ranks_per_node",
        )
