"""What a run begins with: its log, and the weights, state and random streams of its first step."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mlperf_bert.checkpoint.load import load_checkpoint, load_weights, restore_rank_states
from mlperf_bert.checkpoint.manifest import INITIALIZED_FROM, read_manifest, resolve
from mlperf_bert.checkpoint.resume import Start
from mlperf_bert.checkpoint.saving import Identity
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.machine import memory_bytes
from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.balance import StepPlanner
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.open_data import RunData
from mlperf_bert.data.sampler import PublishedStrataSampler
from mlperf_bert.data.set_checks import manifest_sha256
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import on_every_rank
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.parts.memory_forward import Forward
from mlperf_bert.parts.memory_plan import refuse_what_cannot_fit
from mlperf_bert.parts.step import build_step
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.run.environment import git_commit
from mlperf_bert.run.metrics_file import MetricsFile
from mlperf_bert.run.mlperf_log import MlperfLog
from mlperf_bert.step.eager import Step

if TYPE_CHECKING:
    from mlperf_bert.run.progress import Reporter


@dataclass(frozen=True, slots=True)
class Origin:
    """What a run begins from: a seed, weights that were given, or a checkpoint to go on from."""

    config: RunConfig
    identity: Identity
    start: Start
    init_checkpoint: Path | None
    cache_cleared: bool


def start_log(origin: Origin, directory: RunDirectory, info: RankInfo) -> MlperfLog:
    """The MLPerf log, with all records that come before training."""
    config, start = origin.config, origin.start
    is_rank_zero = info.rank == 0
    log = MlperfLog(directory.mlperf_log if is_rank_zero else None, is_rank_zero)
    log.init_start(cache_cleared=origin.cache_cleared)
    log.submission(config)
    log.hyperparameters(config, origin.identity.seed)
    resumed_from = {"step": start.step, "samples": start.samples} if start.is_resumed else None
    log.conditions(
        config,
        # As it was started: ranks that the config spreads over nodes may all be on this one.
        number_of_nodes=-(-info.world_size // info.local_world_size),
        number_of_ranks=info.world_size,
        resumed_from=resumed_from,
        initial_weights="random" if origin.init_checkpoint is None else "checkpoint",
    )
    return log


def start_reporter(
    directory: RunDirectory,
    info: RankInfo,
    config: RunConfig,
    data: RunData,
    planner: StepPlanner,
    start: Start,
) -> "Reporter":
    """What a person sees of the run, with the lines that come first."""
    from mlperf_bert.run.progress import (
        Reporter,  # its rich is not for `bench`, which shows no progress
    )

    path = directory.run / "stdout.log" if info.rank == 0 else None
    reporter = on_every_rank(
        info, lambda: Reporter(path, config.max_steps, continued=start.continues)
    )
    for remark in start.remarks:
        reporter.line(remark)
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


def check_memory(
    config: RunConfig,
    device: torch.device,
    largest_forward: Callable[[], Forward],
    *,
    evaluates: bool = True,
) -> None:
    """Raise ConfigError where a device cannot hold what is planned, before anything is built.

    A CPU's memory must hold weights and gradients; what else it has, others use too.
    """
    if device.type == "cuda":
        num_bytes = torch.cuda.get_device_properties(device).total_memory
        refuse_what_cannot_fit(config, largest_forward(), num_bytes, evaluates=evaluates)
        return
    needed = 8 * config.model.num_parameters * config.parallel.ranks_per_node
    if needed > memory_bytes():
        problem = f"makes a model whose weights and gradients take {needed / 2**30:,.0f} GiB"
        remedy = (
            f"this machine has {memory_bytes() / 2**30:,.0f}: use a smaller one, or fewer ranks"
        )
        raise ConfigError("model.hidden_size", problem, remedy)


def start_metrics_file(directory: RunDirectory, info: RankInfo, start: Start) -> MetricsFile:
    """`metrics.jsonl`, cut after the step from which a run goes on."""
    path = directory.run / "metrics.jsonl" if info.rank == 0 else None
    after = start.step if start.continues else None
    return on_every_rank(info, lambda: MetricsFile(path, after))


def make_identity(seed: int, data: RunData, info: RankInfo) -> Identity:
    """What the run's checkpoints say of it."""
    sets = (data.train_reader.set_dir, data.held_out_reader.set_dir)
    digests = " ".join(manifest_sha256(set_dir) for set_dir in sets)
    return Identity(
        seed=seed,
        vocabulary_sha256=data.train.manifest.vocabulary_sha256,
        data_sha256=hashlib.sha256(digests.encode()).hexdigest(),
        world_size=info.world_size,
    )


def begin_training(
    origin: Origin,
    model: BertForPretraining,
    info: RankInfo,
    device: torch.device,
    shapes: tuple[StaticShape, ...],
) -> tuple[FlatOptimizer, Step]:
    """Optimizer and step, with the weights, state and random streams that the run begins with."""
    start, digest = origin.start, origin.identity.vocabulary_sha256
    if origin.init_checkpoint is not None and start.checkpoint is None:
        given = origin.init_checkpoint
        on_every_rank(info, lambda: load_weights(model, given, digest))
    # Of the step too, as another number of ranks has no streams to go on from.
    torch.manual_seed(
        derive_seed(origin.identity.seed, f"others' kernels from {start.step}", info.rank)
    )
    optimizer, step = build_step(model, origin.config, info, device, shapes)
    if start.checkpoint is not None:
        saved = start.checkpoint
        state = load_checkpoint(optimizer, saved, digest, info, is_verified=True)
        restore_rank_states(saved, state, model, info, device)
    return optimizer, step


def _initialized_from(origin: Origin) -> dict[str, str]:
    """For manifests: whose weights the run, or the one it goes on from, began with."""
    saved = origin.start.checkpoint or origin.init_checkpoint
    known = {} if saved is None else read_manifest(resolve(saved)).origin
    if not known or INITIALIZED_FROM in known:
        return dict(known)
    return {INITIALIZED_FROM: ", ".join(known.values())}


def make_writer(
    origin: Origin,
    directory: RunDirectory,
    model: BertForPretraining,
    optimizer: FlatOptimizer,
    info: RankInfo,
    device: torch.device,
) -> CheckpointWriter:
    """What writes the run's checkpoints."""
    config, start = origin.config, origin.start
    return CheckpointWriter(
        directory.checkpoints,
        optimizer,
        config,
        info,
        device,
        fp8_state=model.fp8_state(),
        keep_last=config.checkpoint.keep_last,
        commit=git_commit() if info.rank == 0 else None,
        after=start.step if start.continues else None,
        origin=on_every_rank(info, lambda: _initialized_from(origin)),
    )
