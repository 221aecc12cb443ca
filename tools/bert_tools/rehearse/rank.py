"""Builds one rank of a run without its cluster, for `train --rehearse`.

The rank joins a process group in which torch imitates all other ranks (`fake_pg`): a collective
returns at once, as if every rank had sent what this rank sends. Weights, gradients and the
optimizer's state are created by the functions that a run calls, on torch's device "meta", which
keeps shapes and data types but no memory. Only DistributedDataParallel needs real tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bert_tools.common.length_histogram import planner_of_run, shapes_of_planner
from mlperf_bert.checkpoint.first_weights import check_first_weights, check_model
from mlperf_bert.checkpoint.manifest import resolve
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.balance import StepPlanner, make_planner
from mlperf_bert.data.capacity import StaticShape, shape_of
from mlperf_bert.data.set_checks import RunData, open_data
from mlperf_bert.distributed.clipping import SumInFp32
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.errors import ConfigError
from mlperf_bert.evaluation.evaluate import cut_by_tokens, tokens_per_micro_batch
from mlperf_bert.extras import require_packages
from mlperf_bert.model.bert import make_model
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.optim.optimizers import make_optimizer
from mlperf_bert.step.data_parallel import DataParallel, make_data_parallel

FIRST_STEPS = 3
_SEED = 1  # of a rehearsal whose config draws its seed


def rank_info(config: RunConfig, rank: int) -> RankInfo:
    """Return the numbers of a rank, with ranks placed node by node as launchers place them.

    Raises ConfigError if the config has no such rank.
    """
    parallel = config.parallel
    if not 0 <= rank < parallel.world_size:
        problem = f"{rank} is not a rank of this config, which has {parallel.nodes} x "
        problem += f"{parallel.ranks_per_node} ranks"
        remedy = f"pass a number from 0 to {parallel.world_size - 1}, or change parallel.nodes"
        raise ConfigError("--rehearse", problem, remedy)
    node, local = divmod(rank, parallel.ranks_per_node)
    return RankInfo(rank, parallel.world_size, local, parallel.ranks_per_node, node, "slurm")


def check_packages(config: RunConfig) -> None:
    """Raise ConfigError if the packages that `data.loader` needs are not installed."""
    if config.data.loader == "dali":
        require_packages("data.loader", "dali", "nvidia.dali")
    if config.data.loader == "mpi_readers":
        require_packages("data.loader", "mpi", "mpi4py")


def check_weights(config: RunConfig, data_dir: Path | None) -> None:
    """Check the initial weights, and if there is a prepared set, that both belong together.

    Raises ConfigError or CheckpointError as the start of a run does.
    """
    if data_dir is not None:
        check_first_weights(config, data_dir)
    elif config.run.init_checkpoint:
        check_model(resolve(Path(config.run.init_checkpoint)), config.model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The steps of a run as its planner plans them, and the shapes that a captured step has.

    `data` is None if the steps are planned from published lengths instead of a prepared set.
    """

    config: RunConfig
    planner: StepPlanner
    shapes: tuple[StaticShape, ...]
    data: RunData | None

    def in_words(self, info: RankInfo) -> Iterator[str]:
        """Describe the sizes of the first steps of a rank, one line per step."""
        for step in range(1, FIRST_STEPS + 1):
            plan = self.planner.plan(step)
            sizes = zip(
                plan.counts[info.rank],
                plan.num_tokens[info.rank],
                plan.num_masked[info.rank],
                strict=True,
            )
            batches = [
                f"{sequences:,} sequences, {tokens:,} tokens, {masked:,} masked"
                for sequences, tokens, masked in sizes
            ]
            more = f" and {len(batches) - 1} more micro-batches" if len(batches) > 1 else ""
            shape = shape_of(plan, self.shapes)
            padded = f", padded to {shape.tokens:,} tokens" if shape else ""
            slowest = f"largest rank {100 * (plan.imbalance_tokens - 1):.1f} % above the mean"
            yield f"step {step}: {batches[0]}{more}{padded}; {slowest}"

    @property
    def most_tokens(self) -> int:
        """Number of tokens of the largest micro-batch, with its padding."""
        if self.shapes:
            return self.shapes[-1].tokens
        plans = (self.planner.plan(step) for step in range(1, FIRST_STEPS + 1))
        return max(int(plan.num_tokens.max()) for plan in plans)


def plan_steps(config: RunConfig, data_dir: Path | None, info: RankInfo) -> Steps:
    """Open and check the prepared set, if there is one, and plan the run's steps.

    Raises ConfigError or DataError as the start of a run does.
    """
    data = None
    if data_dir is None:
        planner = planner_of_run(config)
    else:
        data = open_data(config, data_dir, checks_files=True)
        seed = _SEED if config.run.seed == "random" else config.run.seed
        planner = make_planner(config, data.train, seed)
    is_captured = config.run.step_mode == "captured"
    shapes = shapes_of_planner(config, planner) if is_captured else ()
    return Steps(config=config, planner=planner, shapes=shapes, data=data)


def evaluation_in_words(config: RunConfig, data: RunData, info: RankInfo) -> str:
    """Describe the part of the held-out set that a rank evaluates."""
    device = torch.device("cuda" if config.run.device == "cuda" else "cpu")
    num_tokens = tokens_per_micro_batch(data.held_out, info.world_size, device)
    batches = cut_by_tokens(data.held_out, num_tokens)[info.rank :: info.world_size]
    sequences = sum(len(batch) for batch in batches)
    return (
        f"evaluation: {sequences:,} of {data.held_out.manifest.num_samples:,} held-out sequences "
        f"in {len(batches)} batches on this rank"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The memory of a rank: its weights, its gradients and the state of its optimizer."""

    num_parameters: int
    made: DataParallel
    optimizer: FlatOptimizer

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights, in the data type in which the model computes."""
        return self.made.buffers.weights.nbytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients, and of averaged ones and fp32 sums that have their own memory."""
        sums = 4 * self.num_parameters if isinstance(self.made.clipping, SumInFp32) else 0
        return sums + _bytes_of([self.made.buffers.gradients, self.made.gradients])

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the exact weights and moments that this rank updates."""
        weights = self.made.buffers.weights.untyped_storage()._cdata
        state = self.optimizer.changed_by_step().values()
        return _bytes_of([each for each in state if each.untyped_storage()._cdata != weights])

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint, which has the exact weights and moments of all ranks."""
        return 3 * self.num_parameters * self.optimizer.shard.masters.element_size()

    @property
    def buckets_in_words(self) -> str:
        """Describe the buckets in which gradients are sent, and the collective that sends them."""
        buckets = self.made.buffers.layout.buckets
        size = self.made.buffers.gradients.element_size()
        largest = max(bucket.stop - bucket.start for bucket in buckets) * size / 2**20
        sent = "all-reduced" if self.optimizer.num_shards == 1 else "reduce-scattered"
        return f"{len(buckets)} buckets of up to {largest:.0f} MiB, {sent}"


def _bytes_of(tensors: list[Tensor]) -> int:
    """Return the bytes of some tensors. Memory that several of them share counts once."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@contextmanager
def imitated_ranks(info: RankInfo) -> Iterator[None]:
    """Join a process group whose other ranks torch imitates. A single rank joins no group."""
    if info.world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=info.rank, world_size=info.world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(config: RunConfig, info: RankInfo) -> Built:
    """Create the model, the averaging of gradients and the optimizer of a rank.

    Call this function inside `imitated_ranks`. Raises ConfigError as the start of a run does.
    """
    needs_memory = config.parallel.data_parallel == "ddp" and info.world_size > 1
    device = torch.device("cpu" if needs_memory else "meta")
    model = make_model(config, _SEED, device)
    made, initial = make_data_parallel(model, config, info, device)
    optimizer = make_optimizer(config.optim, made.buffers, initial, made.gradients, made.shards)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Built(num_parameters=num_parameters, made=made, optimizer=optimizer)


def least_activation_bytes(model: ModelSection, tokens: int) -> int:
    """Return a lower bound of the bytes that the forward pass of `tokens` tokens stores.

    The bound counts only what a layer cannot do without in its backward pass: its input, query, key
    and value, the result of attention, and the inputs of the activation. In BERT, these are also
    the two sums before its norms, the result of the first norm, and that of the activation. A step
    of BERT-large stores 4 % more than that (logs/2026-11-22-memory).
    """
    hidden, wide = model.hidden_size, model.intermediate_size
    # ModernBERT's activation has two inputs of this width, one of which is a gate.
    channels = 2 * wide + (6 if model.architecture == "modern" else 8) * hidden
    return tokens * model.num_layers * channels * (4 if model.precision == "fp32" else 2)
