"""Build of a run's parts from its config: the only file that knows all classes.

No training or evaluation sample is read here, only the vocabulary's digest, sidecars and index.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert import git_commit
from mlperf_bert.checkpoint.first_weights import is_huggingface, origin_of, origin_of_phase
from mlperf_bert.checkpoint.load import (
    load_checkpoint,
    load_first_weights,
    load_phase,
    restore_rank_states,
)
from mlperf_bert.checkpoint.manifest import (
    INITIALIZED_FROM,
    CheckpointState,
    read_config,
    read_manifest,
    resolve,
)
from mlperf_bert.checkpoint.resume import NEW_RUN, Start, check_data
from mlperf_bert.checkpoint.saving import Saving
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.machine import memory_bytes
from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.balance import StepPlanner, make_planner
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.contents import ContentsCheck
from mlperf_bert.data.index import LengthIndex, sets_sha256
from mlperf_bert.data.loader import Loader
from mlperf_bert.data.sampler import PublishedStrataSampler
from mlperf_bert.data.set_checks import RunData, open_data
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.distributed.bucket_plan import (
    FlatLayout,
    ddp_bucket_cap_mb,
    plan_in_reverse,
    plan_layout,
)
from mlperf_bert.distributed.clipping import Clipping, make_clipping, make_wire
from mlperf_bert.distributed.flat_reducer import (
    FlatBuffers,
    FlatReducer,
    ShardGroup,
    flat_weights,
    num_shards,
)
from mlperf_bert.distributed.launch import RankInfo, host_name
from mlperf_bert.distributed.reader_roles import MpiProcess
from mlperf_bert.distributed.session import check_nodes, on_every_rank
from mlperf_bert.evaluation.batches import tokens_per_forward
from mlperf_bert.evaluation.evaluate import Evaluator
from mlperf_bert.evaluation.schedule import InTurn
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.choices import AttentionChoice
from mlperf_bert.model.tensor_names import tensorflow_name
from mlperf_bert.optim.flat_optimizer import FlatOptimizer, LossScale
from mlperf_bert.optim.optimizers import make_optimizer
from mlperf_bert.optim.schedule import learning_rates
from mlperf_bert.parts.kernels_in_use import agree_on_kernels, changed_kernels
from mlperf_bert.parts.loader import build_loader
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.run.metrics import Metrics, MetricsFile
from mlperf_bert.run.mlperf_log import MlperfLog
from mlperf_bert.run.slowest_rank import SlowestRank
from mlperf_bert.signals.stop_request import StopRequest
from mlperf_bert.signals.whereabouts import Whereabouts
from mlperf_bert.step.captured import CapturedStep, Step, use_capturable_stream
from mlperf_bert.step.eager import EagerStep, weights_dtype

if TYPE_CHECKING:
    from mlperf_bert.common.console import ProgressLines
    from mlperf_bert.run.progress import Reporter

WARM_UP_CALLS = 3  # calls of an update before its capture
READ_LENGTHS_ON_THE_HOST = ("reference", "grouped")  # on CUDA
DDP_WARM_UP_CALLS = 11  # torch's notes on CUDA graphs require this with DistributedDataParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run as seen by one of its ranks: its settings, this rank, and where the run starts.

    `seed` is the same on every rank. Weights come from `init_checkpoint` unless the run resumes
    from a checkpoint (`start`). `process` is this rank among trainers and readers, if there are
    readers; `cache_cleared` goes into the log; the loop keeps `whereabouts` up to date; `shown`
    already tells a person about the start.
    """

    config: RunConfig
    seed: int
    info: RankInfo
    device: torch.device
    data_dir: Path
    directory: RunDirectory
    start: Start = NEW_RUN
    process: MpiProcess | None = None
    cache_cleared: bool = False
    whereabouts: Whereabouts = field(default_factory=Whereabouts)
    shown: "ProgressLines | None" = None

    @property
    def init_checkpoint(self) -> Path | None:
        """The path of the first weights; None if they are drawn."""
        given = self.config.run.init_checkpoint
        return Path(given) if given else None

    @property
    def begins_phase(self) -> bool:
        """True if the optimizer's state comes from `init_checkpoint` too."""
        return self.start.checkpoint is None and self.config.run.init_state == "training"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Everything the loop needs, each built for this rank."""

    run: Run
    model: BertForPretraining
    optimizer: FlatOptimizer
    step: Step
    contents: ContentsCheck
    loader: Loader
    evaluator: Evaluator
    evaluation: InTurn
    stop: StopRequest
    slowest_rank: SlowestRank
    metrics: Metrics
    metrics_file: MetricsFile
    saving: Saving
    reporter: "Reporter"
    log: MlperfLog

    def in_words(self) -> str:
        """The run in one line, for the person who started it."""
        run, parallel = self.run, self.run.config.parallel
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        ranks = f"{run.info.world_size} rank{'s' if run.info.world_size > 1 else ''}"
        return (
            f"{num_parameters:,} parameters, {ranks} on {run.device.type}, global batch "
            f"{parallel.global_batch_size}, seed {run.seed}, in {run.directory.run}"
        )


def build(run: Run) -> Parts:
    """Build this rank's parts; the process group exists already. Raises on contradictions."""
    config, info, device, start = run.config, run.info, run.device, run.start
    _check_world_size(config, info)
    if config.run.step_mode == "captured":
        use_capturable_stream(device)
    data = on_every_rank(info, lambda: open_data(config, run.data_dir, info.rank))
    identity = _identity(run, data)
    on_every_rank(info, lambda: check_data(start, identity.data_sha256, run.data_dir))
    planner = make_planner(config, data.train, run.seed)
    loader, shapes = build_loader(
        config, planner, data.train_reader, run.seed, info, device, run.process, start.step + 1
    )
    on_every_rank(info, lambda: check_memory(config, device))
    vocabulary = data.train_reader.set_dir / data.train.manifest.vocabulary_file
    continues = start.continues
    begun = run.directory.begun
    with begun(config, run.seed, info, device, vocabulary=vocabulary, continues=continues):
        log = on_every_rank(info, lambda: _start_log(run))
        reporter = _start_reporter(run, data, planner)
        return _assemble(run, data, identity, loader, shapes, log, reporter)


def _assemble(
    run: Run,
    data: RunData,
    identity: CheckpointState,
    loader: Loader,
    shapes: tuple[StaticShape, ...],
    log: MlperfLog,
    reporter: "Reporter",
) -> Parts:
    """Add model, step, evaluation and saving to the data, the log and the reporter."""
    config, info, device = run.config, run.info, run.device
    model = on_every_rank(info, lambda: make_model(config, run.seed, device))
    agree_on_kernels(info, model)
    reporter.line(model.attention.note)
    identity = replace(identity, attention=model.attention.name, kernels=model.kernels)
    for remark in changed_kernels(run.start.state, identity):
        reporter.line(remark)
    log.weights_initialization(map(tensorflow_name, model.state_dict()))
    digest = identity.vocabulary_sha256
    is_first = run.init_checkpoint is not None and run.start.checkpoint is None
    if is_first and not run.begins_phase:
        first = partial(load_first_weights, model, config, digest, run.seed)
        reporter.line(on_every_rank(info, first))
    optimizer, step = _begin_training(run, digest, model, shapes, reporter)
    evaluator = make_evaluator(config, data.held_out, data.held_out_reader, info, device)
    metrics = Metrics(config, info.world_size, device)
    replays = device.type == "cuda" and config.run.step_mode == "captured"
    return Parts(
        run=run,
        model=model,
        optimizer=optimizer,
        step=step,
        contents=_contents_check(run, data),
        loader=loader,
        evaluator=evaluator,
        evaluation=InTurn(evaluator, model, optimizer.settle, log),
        stop=StopRequest(info.world_size, device),
        slowest_rank=SlowestRank(info, model.body.embeddings, device, replays=replays),
        metrics=metrics,
        metrics_file=_start_metrics_file(run),
        saving=Saving(
            config=config,
            identity=identity,
            start_of_run=run.start,
            writer=_writer(run, model, optimizer),
            metrics=metrics,
            reporter=reporter,
            write_outcome=partial(run.directory.write_outcome, info),
        ),
        reporter=reporter,
        log=log,
    )


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


def _identity(run: Run, data: RunData) -> CheckpointState:
    """The run's identity in its checkpoints."""
    return CheckpointState(
        step=0,
        samples=0,
        seed=run.seed,
        mlm_accuracy=None,
        vocabulary_sha256=data.train.manifest.vocabulary_sha256,
        data_sha256=sets_sha256(data.train_reader.set_dir, data.held_out_reader.set_dir),
        world_size=run.info.world_size,
    )


def _contents_check(run: Run, data: RunData) -> ContentsCheck:
    """The check of the shards, which the first rank of each node makes, and rank 0."""
    state = run.start.state
    is_first = run.info.rank == 0 or run.info.local_rank == 0
    return ContentsCheck(
        (data.train_reader, data.held_out_reader) if is_first else (),
        known=None if state is None else state.blocks_sha256,
        host=host_name() if run.config.parallel.nodes > 1 else "",
    )


def _start_log(run: Run) -> MlperfLog:
    """The MLPerf log, with all records that come before training."""
    config, info, start = run.config, run.info, run.start
    log = MlperfLog(run.directory.mlperf_log if info.rank == 0 else None)
    log.init_start(cache_cleared=run.cache_cleared)
    log.submission(config)
    log.hyperparameters(config, run.seed)
    resumed_from = {"step": start.step, "samples": start.samples} if start.is_resumed else None
    log.conditions(
        config,
        # By the start, not the config: ranks that it spreads over nodes may all be on this one.
        number_of_nodes=-(-info.world_size // info.local_world_size),
        number_of_ranks=info.world_size,
        resumed_from=resumed_from,
        initial_weights="checkpoint" if _began_with_weights(run) else "random",
    )
    return log


def _began_with_weights(run: Run) -> bool:
    """True if the run began with given weights; a resumed run's checkpoint decides."""
    if run.start.checkpoint is not None and run.info.rank == 0:
        return bool(read_config(run.start.checkpoint).run.init_checkpoint)
    return run.init_checkpoint is not None


def _start_reporter(run: Run, data: RunData, planner: StepPlanner) -> "Reporter":
    """The reporter of the run for a person, with its first lines shown."""
    from mlperf_bert.run.progress import Reporter

    config, start = run.config, run.start
    path = run.directory.run / "stdout.log" if run.info.rank == 0 else None
    reporter = on_every_rank(
        run.info,
        lambda: Reporter(path, config.max_steps, continued=start.continues, shown=run.shown),
    )
    for remark in start.remarks:
        reporter.line(remark)
    reporter.line(data.target_in_words)
    reporter.line(f"sampler {config.data.sampler}, balance {config.data.balance}")
    if isinstance(planner.sampler, PublishedStrataSampler):
        reporter.line(planner.sampler.in_words())
    return reporter


def _start_metrics_file(run: Run) -> MetricsFile:
    """`metrics.jsonl`, cut after the step from which a run resumes."""
    path = run.directory.run / "metrics.jsonl" if run.info.rank == 0 else None
    after = run.start.step if run.start.continues else None
    return on_every_rank(run.info, lambda: MetricsFile(path, after))


def make_model(config: RunConfig, seed: int, device: torch.device) -> BertForPretraining:
    """The bare model, its weights and dropout from the run's seed, equal on every rank."""
    model = BertForPretraining(config.model, device, seed=derive_seed(seed, "weights"))
    model.dropout_seed = derive_seed(seed, "dropout")
    return model


def check_memory(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigError if a CPU's memory cannot hold weights and gradients.

    Whether a batch fits a GPU is found at warm-up.
    """
    if device.type == "cuda":
        return
    needed = 8 * config.model.num_parameters * config.parallel.ranks_per_node
    if needed > memory_bytes():
        problem = f"makes a model whose weights and gradients take {needed / 2**30:,.0f} GiB"
        remedy = (
            f"this machine has {memory_bytes() / 2**30:,.0f}: use a smaller one, or fewer ranks"
        )
        raise ConfigError("model.hidden_size", problem, remedy)


def _begin_training(
    run: Run,
    vocabulary_sha256: str,
    model: BertForPretraining,
    shapes: tuple[StaticShape, ...],
    reporter: "Reporter",
) -> tuple[FlatOptimizer, Step]:
    """Optimizer and step, with the run's first weights, state and random streams."""
    start, info, digest = run.start, run.info, vocabulary_sha256
    # Seeded by the step too, because another number of ranks has no streams to resume.
    torch.manual_seed(derive_seed(run.seed, f"others' kernels from {start.step}", info.rank))
    optimizer, step = build_step(model, run.config, info, run.device, shapes)
    if start.checkpoint is not None:
        state = load_checkpoint(optimizer, start.checkpoint, digest, info, is_verified=True)
        restore_rank_states(start.checkpoint, state, model, info, run.device)
    elif run.begins_phase:
        assert run.init_checkpoint is not None  # `check_first_weights` refuses it
        reporter.line(load_phase(optimizer, model, run.init_checkpoint, digest, info, run.device))
    return optimizer, step


def build_step(
    model: BertForPretraining,
    config: RunConfig,
    info: RankInfo,
    device: torch.device,
    shapes: tuple[StaticShape, ...] = (),
) -> tuple[FlatOptimizer, Step]:
    """The optimizer of this rank's part of the state, and the step that drives it.

    `shapes` are those of a captured step, the smallest first; without any the step is eager.
    `model` has its initial weights, on `device`. Only the memory of its weights and gradients
    changes and, in 16-bit precisions, their dtype. Every rank must call it at the same time.
    """
    if shapes:
        _check_capturable(model.attention, device)
    parallel = config.parallel
    check_nodes("parallel.data_parallel", parallel.data_parallel, info, parallel.ranks_per_node)
    layout = _plan_layout(model, config, num_shards(parallel.data_parallel, info))
    initial = flat_weights(model, layout)
    dtype = weights_dtype(config.model.precision, initial.dtype)
    buffers = FlatBuffers(model, layout, initial.to(dtype))
    loss_scale = _loss_scale(config, device)
    parallel_model, clipping, gradients, others = _reduction(
        model, buffers, config, info, loss_scale, device
    )
    optimizer = make_optimizer(config.optim, buffers, initial, gradients, others, loss_scale)
    step = EagerStep(
        parallel_model,
        optimizer,
        _learning_rates(config, device),
        clipping,
        model.step,
        config.model.precision,
    )
    if not shapes:
        return optimizer, step
    wrapped = isinstance(parallel_model, DistributedDataParallel)
    return optimizer, CapturedStep(
        step,
        shapes,
        forwards=parallel.grad_accum_steps,
        device=device,
        warm_up_calls=DDP_WARM_UP_CALLS if wrapped else WARM_UP_CALLS,
    )


def _check_capturable(attention: AttentionChoice, device: torch.device) -> None:
    """Raise ConfigError for attention that a graph cannot hold."""
    if device.type != "cuda":
        return
    if attention.name in READ_LENGTHS_ON_THE_HOST:
        problem = (
            f"{attention.name!r} reads lengths on the host, which a captured step cannot do "
            f"[{attention.note}]"
        )
        remedy = "use 'triton' or 'flash' (bf16 or fp16), or run.step_mode 'eager'"
        raise ConfigError("model.attention", problem, remedy)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        problem = "'captured' with ranks that share a GPU, and so talk over gloo"
        raise ConfigError("run.step_mode", problem, "use 'eager', or a rank for each GPU")


def _plan_layout(model: nn.Module, config: RunConfig, num_shards: int) -> FlatLayout:
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    dtype = weights_dtype(config.model.precision, next(iter(trained.values())).dtype)
    buckets = plan_in_reverse(
        {name: each.numel() for name, each in trained.items()},
        dtype.itemsize,
        config.parallel.bucket_cap_mb,
    )
    shapes = {name: tuple(each.shape) for name, each in trained.items()}
    return plan_layout(shapes, buckets, num_shards)


def _reduction(
    model: nn.Module,
    buffers: FlatBuffers,
    config: RunConfig,
    info: RankInfo,
    loss_scale: LossScale,
    device: torch.device,
) -> tuple[nn.Module, Clipping, Tensor, ShardGroup]:
    """The averaging of gradients, their buffer, and the group of the other shards.

    A run of one rank has no process group and averages nothing.
    """
    parallel = config.parallel
    wire = make_wire(config.clip, buffers.weights.dtype, parallel.allreduce_dtype, loss_scale.scale)
    group = ShardGroup(info, buffers.layout.num_shards, device)
    if dist.is_initialized() and parallel.data_parallel != "ddp":
        reducer = FlatReducer(
            model, buffers, config.clip, group, wire, info.world_size, parallel.grad_accum_steps
        )
        return model, reducer, reducer.shard_gradients, group
    if dist.is_initialized():
        model = DistributedDataParallel(
            model,
            bucket_cap_mb=ddp_bucket_cap_mb(parallel.bucket_cap_mb),
            gradient_as_bucket_view=True,
        )
        # DDP's own statistics wait for the device every 100 steps, which a capture forbids.
        model._set_ddp_runtime_logging_sample_rate(2**31 - 1)  # type: ignore[no-untyped-call]
    clipping = make_clipping(
        config.clip,
        model,
        wire,
        forwards=parallel.grad_accum_steps,
        bucket_cap_mb=parallel.bucket_cap_mb,
    )
    return model, clipping, buffers.gradients, group


def _loss_scale(config: RunConfig, device: torch.device) -> LossScale:
    optim = config.optim
    if config.model.precision != "fp16":
        return LossScale(device)
    return LossScale(device, optim.initial_loss_scale, optim.loss_scale_growth_steps)


def _learning_rates(config: RunConfig, device: torch.device) -> Tensor:
    """Rates of every possible step from 1, warm-up included; element 0 is not read."""
    last = max(config.max_steps, config.run.warm_up_steps)
    rates = learning_rates(np.arange(last + 1), config.schedule, config.optim.learning_rate)
    rates[0] = 0.0
    return torch.from_numpy(rates).to(device)


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


def _writer(run: Run, model: BertForPretraining, optimizer: FlatOptimizer) -> CheckpointWriter:
    """The writer of the run's checkpoints."""
    config, info, start = run.config, run.info, run.start
    return CheckpointWriter(
        run.directory.checkpoints,
        optimizer,
        config,
        info,
        run.device,
        fp8_state=model.fp8_state(),
        keep_last=config.checkpoint.keep_last,
        commit=git_commit() if info.rank == 0 else None,
        after=start.step if start.continues else None,
        origin=on_every_rank(info, lambda: _initialized_from(run)),
    )


def _initialized_from(run: Run) -> dict[str, str]:
    """Manifest entries: the weights or state that the run, or the one it resumes, began with."""
    if run.begins_phase and run.init_checkpoint is not None:
        return {INITIALIZED_FROM: origin_of_phase(run.init_checkpoint)}
    saved = run.start.checkpoint or run.init_checkpoint
    if saved is not None and is_huggingface(saved):
        return {INITIALIZED_FROM: origin_of(saved)} if run.info.rank == 0 else {}
    known = {} if saved is None else read_manifest(resolve(saved)).origin
    if not known or INITIALIZED_FROM in known:
        return dict(known)
    return {INITIALIZED_FROM: ", ".join(known.values())}
