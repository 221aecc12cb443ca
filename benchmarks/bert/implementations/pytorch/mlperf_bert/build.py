"""A config becomes parts: the only file that knows all classes.

No training or evaluation sample is read here: only the vocabulary's digest, sidecars and index.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mlperf_bert.build_evaluation import make_evaluator, make_schedule
from mlperf_bert.build_step import build_step
from mlperf_bert.checkpoint import load_weights
from mlperf_bert.config import RunConfig
from mlperf_bert.data.balance import Balance, CostModel
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.capacity_staging import CapacityStaging
from mlperf_bert.data.choose_capacity import plan_shapes
from mlperf_bert.data.choose_sampler import make_sampler
from mlperf_bert.data.exchange import ExchangeSource
from mlperf_bert.data.gather import Gatherer
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.loader import BatchSource, DirectSource, Loader
from mlperf_bert.data.loader_dali import DaliSource
from mlperf_bert.data.mpi_pair import Pair
from mlperf_bert.data.mpi_source import MpiSource
from mlperf_bert.data.read_ahead import ReadAhead
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.data.step_plan import StepPlanner
from mlperf_bert.data.strata import PublishedStrataSampler
from mlperf_bert.data.token_packets import token_dtype
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.node_group import check_nodes, make_exchange_group
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
    others = _source_with_others(config, data.train_reader, seed, info, process)
    shapes = _capacities(config, planner)
    loader = on_every_rank(
        info, lambda: _make_loader(config, planner, data.train_reader, info, device, others, shapes)
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


def make_planner(config: RunConfig, index: LengthIndex, seed: int) -> StepPlanner:
    """The step planner of the whole job."""
    data, parallel = config.data, config.parallel
    linear, quadratic = config.cost_coefficients
    return StepPlanner(
        make_sampler(
            data.sampler,
            order_by_length=index.order_by_length,
            length_histogram=index.manifest.length_histogram,
            global_batch_size=parallel.global_batch_size,
            seed=derive_seed(seed, "sampler"),
            quantiles=data.quantiles,
        ),
        index.lengths,
        index.masked_counts,
        world_size=parallel.world_size,
        grad_accum_steps=parallel.grad_accum_steps,
        loss_normalization=config.optim.loss_normalization,
        balance=Balance(
            policy=data.balance,
            ranks_per_node=parallel.ranks_per_node,
            deal=data.deal,
            counts=data.counts_per_rank,
        ),
        balance_model=data.balance_model,
        cost=CostModel(linear=linear, quadratic=quadratic),
    )


def _capacities(config: RunConfig, planner: StepPlanner) -> tuple[StaticShape, ...]:
    """What the forwards of a captured step are padded to; nothing where it is eager."""
    if config.run.step_mode == "eager":
        return ()
    return plan_shapes(
        planner,
        config.max_steps,
        max_seqlen=config.data.max_seq_length,
        max_masked=config.data.max_predictions,
    )


def _make_loader(
    config: RunConfig,
    planner: StepPlanner,
    reader: SampleReader,
    info: RankInfo,
    device: torch.device,
    others: BatchSource | None,
    shapes: tuple[StaticShape, ...],
) -> Loader:
    is_dali = config.data.loader == "dali"
    source, read_ahead = others, None
    if source is None:
        gatherer = Gatherer(reader, pin_memory=device.type == "cuda" and not is_dali)
        source = DirectSource(gatherer, info.rank)
        read_ahead = ReadAhead(gatherer, info.rank)
    if is_dali:
        source = DaliSource(source, device)
    forwards = config.parallel.grad_accum_steps
    staging = CapacityStaging(shapes, forwards, device) if shapes else None
    return Loader(planner, source, device, read_ahead=read_ahead, staging=staging)


def _source_with_others(
    config: RunConfig,
    reader: SampleReader,
    seed: int,
    info: RankInfo,
    process: MpiProcess | None,
) -> BatchSource | None:
    """What brings the batches where this rank does not read them all by itself.

    Every rank must call it at the same time.
    """
    check_nodes("data.balance", config.data.balance, info, config.parallel.ranks_per_node)
    if process is not None:
        source = MpiSource(Pair(process.world, process.role.partner), info.rank)
        on_every_rank(info, lambda: source.set_up(seed))
        return source
    group = make_exchange_group(config.data.balance, info, config.parallel.ranks_per_node)
    if group is None:
        return None
    token = token_dtype(config.model.vocab_size)
    return ExchangeSource(reader, info.rank, group, config.data.deal, token)


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
