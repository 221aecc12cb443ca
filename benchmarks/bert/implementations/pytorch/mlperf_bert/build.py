"""A config becomes parts: the only file that knows all classes.

No training or evaluation sample is read here: only the vocabulary's digest, sidecars and index.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mlperf_bert.build_evaluation import make_evaluator, make_schedule
from mlperf_bert.build_loader import capacities, make_loader, make_planner, source_with_others
from mlperf_bert.build_step import build_step
from mlperf_bert.checkpoint import load_weights
from mlperf_bert.config import RunConfig
from mlperf_bert.data.loader import Loader
from mlperf_bert.data.step_plan import StepPlanner
from mlperf_bert.data.strata import PublishedStrataSampler
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.reader_roles import MpiProcess
from mlperf_bert.distributed.session import on_every_rank
from mlperf_bert.errors import ConfigError
from mlperf_bert.eval_schedule import EvalSchedule
from mlperf_bert.evaluate import Evaluator
from mlperf_bert.graphs import use_capturable_stream
from mlperf_bert.metrics import Metrics, MetricsFile
from mlperf_bert.mlperf_log import MlperfLog
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.tensor_names import tensorflow_name
from mlperf_bert.open_data import RunData, open_data
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.progress import Reporter
from mlperf_bert.run_directory import RunDirectory
from mlperf_bert.seeds import choose_seed, derive_seed
from mlperf_bert.step import Step
from mlperf_bert.stop_request import StopRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Everything the loop needs, each built for this rank."""

    config: RunConfig
    seed: int
    info: RankInfo
    device: torch.device
    directory: RunDirectory
    vocabulary_sha256: str
    model: BertForPretraining
    optimizer: FlatOptimizer
    step: Step
    loader: Loader
    evaluator: Evaluator
    evaluation: EvalSchedule
    stop: StopRequest
    metrics: Metrics
    metrics_file: MetricsFile
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
) -> Parts:
    """Build this rank's parts; the process group exists already. Raises on contradictions.

    `process` is this rank among trainers and readers, where there are readers; `cache_cleared`
    whether the launcher dropped the page cache on all nodes, as the log will say.
    """
    _check_world_size(config, info)
    if config.run.step_mode == "captured":
        use_capturable_stream(device)
    seed = _common_seed(config, info, device)
    data = on_every_rank(info, lambda: open_data(config, data_dir, info.rank))
    planner = make_planner(config, data.train, seed)
    others = source_with_others(config, data.train_reader, seed, info, process)
    shapes = capacities(config, planner)
    loader = on_every_rank(
        info, lambda: make_loader(config, planner, data.train_reader, info, device, others, shapes)
    )
    vocabulary_sha256 = data.train.manifest.vocabulary_sha256
    own = directory.run if info.rank == 0 else None  # what only rank 0 writes goes there
    with directory.created(config, seed, info, device):
        log = on_every_rank(
            info, lambda: _start_log(config, seed, directory, info, init_checkpoint, cache_cleared)
        )
        reporter = _start_reporter(own, config, data, planner)
        model = make_model(config, seed, device)
        if init_checkpoint is not None:
            on_every_rank(info, lambda: load_weights(model, init_checkpoint, vocabulary_sha256))
        reporter.line(model.attention.note)
        log.weights_initialization(map(tensorflow_name, model.state_dict()))
        torch.manual_seed(derive_seed(seed, "dropout of others' kernels", info.rank))
        optimizer, step = build_step(model, config, info, device, shapes)
        evaluator = make_evaluator(config, data.held_out, data.held_out_reader, info, device)
        return Parts(
            config=config,
            seed=seed,
            info=info,
            device=device,
            directory=directory,
            vocabulary_sha256=vocabulary_sha256,
            model=model,
            optimizer=optimizer,
            step=step,
            loader=loader,
            evaluator=evaluator,
            evaluation=make_schedule(config, evaluator, model, optimizer, log),
            stop=StopRequest(info.world_size, device),
            metrics=Metrics(config, info.world_size, device),
            metrics_file=MetricsFile(own and own / "metrics.jsonl"),
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


def _start_log(
    config: RunConfig,
    seed: int,
    directory: RunDirectory,
    info: RankInfo,
    init_checkpoint: Path | None,
    cache_cleared: bool,
) -> MlperfLog:
    is_rank_zero = info.rank == 0
    log = MlperfLog(directory.mlperf_log if is_rank_zero else None, is_rank_zero)
    log.init_start(cache_cleared=cache_cleared)
    log.submission(config)
    log.hyperparameters(config, seed)
    # As it was started: ranks that the config spreads over nodes may all be on this one.
    nodes = -(-info.world_size // info.local_world_size)
    log.conditions(
        config,
        number_of_nodes=nodes,
        number_of_ranks=info.world_size,
        resumed=False,
        initial_weights="random" if init_checkpoint is None else "checkpoint",
    )
    return log


def _start_reporter(
    directory: Path | None, config: RunConfig, data: RunData, planner: StepPlanner
) -> Reporter:
    reporter = Reporter(directory and directory / "stdout.log", config.max_steps)
    reporter.line(data.target_in_words)
    reporter.line(f"sampler {config.data.sampler}, balance {config.data.balance}")
    if isinstance(planner.sampler, PublishedStrataSampler):
        reporter.line(planner.sampler.in_words())
    return reporter


def make_model(config: RunConfig, seed: int, device: torch.device) -> BertForPretraining:
    """The bare model, its weights and dropout from the run's seed, equal on every rank."""
    model = BertForPretraining(config.model, device, seed=derive_seed(seed, "weights"))
    model.dropout_seed = derive_seed(seed, "dropout")
    return model


def _check_world_size(config: RunConfig, info: RankInfo) -> None:
    parallel = config.parallel
    if parallel.world_size != info.world_size:
        raise ConfigError(
            "parallel.ranks_per_node",
            f"the config asks for {parallel.nodes} x {parallel.ranks_per_node} ranks, "
            f"{info.world_size} were started ({info.launcher})",
            "start that many, or change parallel.nodes and parallel.ranks_per_node",
        )


def _common_seed(config: RunConfig, info: RankInfo, device: torch.device) -> int:
    """One seed for all ranks: rank 0's, where it is drawn at random."""
    seed = torch.tensor(choose_seed(config.run.seed), dtype=torch.int64, device=device)
    if info.world_size > 1:
        dist.broadcast(seed, src=0)
    return int(seed.item())  # host sync, once, before the clock starts
