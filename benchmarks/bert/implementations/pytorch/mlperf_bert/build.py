"""A config becomes parts: the only file that knows all classes.

No training or evaluation sample is read here: only the vocabulary's digest, sidecars and index.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.checkpoint import load_weights
from mlperf_bert.config import RunConfig
from mlperf_bert.data.balance import StepPlanner
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.loader import Loader
from mlperf_bert.data.sampler import UniformSampler
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.distributed.clipping import make_clip_policy
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import on_rank_zero
from mlperf_bert.errors import ConfigError
from mlperf_bert.evaluate import Evaluator
from mlperf_bert.metrics import Metrics, MetricsFile
from mlperf_bert.mlperf_log import MlperfLog
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.tensor_names import tensorflow_name
from mlperf_bert.optim.registry import make_optimizer
from mlperf_bert.optim.schedule import learning_rate
from mlperf_bert.progress import Reporter
from mlperf_bert.run_directory import RunDirectory
from mlperf_bert.seeds import choose_seed, derive_seed
from mlperf_bert.step import EagerStep

LOWEST_TARGET_OVER_GUESS = 1.5


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
    optimizer: torch.optim.Optimizer
    step: EagerStep
    loader: Loader
    evaluator: Evaluator
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
) -> Parts:
    """Build this rank's parts; the process group exists already. Raises on contradictions."""
    _check_world_size(config, info)
    seed = _common_seed(config, info, device)

    train_index = open_index(data_dir / "train", config)
    eval_index = open_index(data_dir / "eval", config)
    _check_same_vocabulary(train_index, eval_index, data_dir)
    _check_batch_fits(config, train_index, data_dir)
    vocabulary_sha256 = train_index.manifest.vocabulary_sha256
    target_in_words = _check_target(config, eval_index)

    # Only now, so that a mistake found above leaves nothing behind; one found below takes it away.
    on_rank_zero(info, lambda: directory.create(config, seed, info, device))
    is_rank_zero = info.rank == 0
    with directory.removed_on_error(is_rank_zero):
        log = _start_log(config, seed, directory, is_rank_zero)
        reporter = Reporter(
            directory.run / "stdout.log" if is_rank_zero else None, config.run.max_steps
        )
        reporter.line(target_in_words)

        model = make_model(config, seed, device)
        if init_checkpoint is not None:
            load_weights(model, init_checkpoint, vocabulary_sha256)
        log.weights_initialization(map(tensorflow_name, model.state_dict()))
        torch.manual_seed(derive_seed(seed, "dropout", info.rank))
        optimizer = make_optimizer(model, config.optim)
        return Parts(
            config=config,
            seed=seed,
            info=info,
            device=device,
            directory=directory,
            vocabulary_sha256=vocabulary_sha256,
            model=model,
            optimizer=optimizer,
            step=_make_step(model, optimizer, config, info),
            loader=Loader(
                make_planner(config, train_index, seed),
                SampleReader(data_dir / "train", train_index.manifest),
                info.rank,
                device,
            ),
            evaluator=make_evaluator(config, data_dir / "eval", eval_index, info, device),
            metrics=Metrics(config, info.world_size, device),
            metrics_file=MetricsFile(directory.run / "metrics.jsonl" if is_rank_zero else None),
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
    config: RunConfig, seed: int, directory: RunDirectory, is_rank_zero: bool
) -> MlperfLog:
    log = MlperfLog(directory.mlperf_log if is_rank_zero else None, is_rank_zero)
    log.init_start(cache_cleared=False)  # nothing here drops the page cache, and the log says so
    log.submission(config)
    log.hyperparameters(config, seed)
    return log


def make_model(config: RunConfig, seed: int, device: torch.device) -> BertForPretraining:
    """The bare model, its weights drawn from the run's seed, equal on every rank."""
    return BertForPretraining(config.model, device, seed=derive_seed(seed, "weights"))


def make_evaluator(
    config: RunConfig, eval_dir: Path, index: LengthIndex, info: RankInfo, device: torch.device
) -> Evaluator:
    """The evaluator of this rank."""
    return Evaluator(
        index,
        SampleReader(eval_dir, index.manifest),
        batch_size=config.eval.batch_size,
        rank=info.rank,
        world_size=info.world_size,
        device=device,
        precision=config.model.precision,
    )


def make_planner(config: RunConfig, index: LengthIndex, seed: int) -> StepPlanner:
    """The step planner of the whole job."""
    model, parallel = config.model, config.parallel
    # Multiply-adds per token of one layer: 4 D^2 + 2 D F in products, 2 D per attended token.
    linear = 4 * model.hidden_size + 2 * model.intermediate_size
    return StepPlanner(
        UniformSampler(
            index.manifest.num_samples,
            parallel.global_batch_size,
            derive_seed(seed, "sampler"),
        ),
        index.lengths,
        index.masked_counts,
        world_size=parallel.world_size,
        grad_accum_steps=parallel.grad_accum_steps,
        loss_normalization=config.optim.loss_normalization,
        attention_length=linear / 2,
    )


def open_index(set_dir: Path, config: RunConfig) -> LengthIndex:
    """Open a prepared set and hold it against the config."""
    index = LengthIndex.open(set_dir)
    manifest = index.manifest
    if manifest.vocab_size != config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size",
            f"is {config.model.vocab_size}, the data in {set_dir} has {manifest.vocab_size}",
            "set it to the data's, or give other data",
        )
    for field, limit, used in (
        ("data.max_seq_length", config.data.max_seq_length, manifest.max_seq_length),
        ("data.max_predictions", config.data.max_predictions, manifest.max_predictions),
    ):
        if used > limit:
            raise ConfigError(
                field, f"is {limit}, the data in {set_dir} needs {used}", "raise it to that"
            )
    return index


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


def _check_same_vocabulary(train: LengthIndex, held_out: LengthIndex, data_dir: Path) -> None:
    if train.manifest.vocabulary_sha256 != held_out.manifest.vocabulary_sha256:
        raise ConfigError(
            "--data",
            f"{data_dir}: train and eval were made with different vocabularies",
            "prepare both with the same one",
        )


def _check_batch_fits(config: RunConfig, train: LengthIndex, data_dir: Path) -> None:
    global_batch_size, num_samples = config.parallel.global_batch_size, train.manifest.num_samples
    if global_batch_size > num_samples:
        raise ConfigError(
            "parallel.local_batch_size",
            f"makes a global batch of {global_batch_size:,}, {data_dir} has {num_samples:,} "
            "training samples",
            "lower it, parallel.grad_accum_steps or the ranks, or prepare more data",
        )


def _check_target(config: RunConfig, held_out: LengthIndex) -> str:
    """Hold the target against the best guess that ignores context; return both in words."""
    baseline = held_out.manifest.baseline
    target = config.eval.target_accuracy
    if baseline is None:
        return f"target accuracy {target:.4f}"
    guess = baseline.context_free_accuracy
    lowest = LOWEST_TARGET_OVER_GUESS * guess
    if config.mlperf.enforce_rules and target < lowest:
        raise ConfigError(
            "eval.target_accuracy",
            f"{target} is {target / guess:.2f} x the best context-free guess {guess:.4f}",
            f"set it to at least {lowest:.4f}, {LOWEST_TARGET_OVER_GUESS} x the guess",
        )
    return (
        f"target accuracy {target:.4f} is {target / guess:.2f} x the best context-free guess "
        f"{guess:.4f} ({baseline.masked_tokens:,} held-out masked tokens); most frequent "
        f"token on [MASK] inputs {baseline.mask_only_accuracy:.4f}"
    )


def _make_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: RunConfig, info: RankInfo
) -> EagerStep:
    return EagerStep(
        _data_parallel(model, config, info),
        optimizer,
        lambda step: learning_rate(step, config.schedule, config.optim.learning_rate),
        make_clip_policy(config.clip),
        config.model.precision,
    )


def _data_parallel(model: nn.Module, config: RunConfig, info: RankInfo) -> nn.Module:
    if info.world_size == 1:
        return model
    return DistributedDataParallel(
        model, bucket_cap_mb=config.parallel.bucket_cap_mb, gradient_as_bucket_view=True
    )
