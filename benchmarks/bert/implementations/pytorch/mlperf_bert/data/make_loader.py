"""Build a rank's loader from the config, with its batch source, dynamic masks and padded shapes."""

from pathlib import Path

import torch

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.balance import StepPlanner, make_planner
from mlperf_bert.data.capacity import StaticShape, plan_shapes
from mlperf_bert.data.exchange import ExchangeSource
from mlperf_bert.data.loader import BatchSource, DaliCopy, DirectSource, Loader, Staging
from mlperf_bert.data.masking import DynamicMasks
from mlperf_bert.data.mpi_readers import (
    MpiSource,
    Pair,
    PeerExchange,
    StepReader,
    Tag,
    serve_trainer,
)
from mlperf_bert.data.set_checks import open_index
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.reader_roles import MpiProcess
from mlperf_bert.distributed.session import check_nodes, make_exchange_group, on_every_rank
from mlperf_bert.seeds import derive_seed
from mlperf_bert.vocabulary.word_pieces import token_dtype


def make_loader(
    config: RunConfig,
    planner: StepPlanner,
    reader: SampleReader,
    seed: int,
    info: RankInfo,
    device: torch.device,
    process: MpiProcess | None,
    first_step: int,
) -> tuple[Loader, tuple[StaticShape, ...]]:
    """Create the loader of this rank, and the shapes to which it pads batches of captured steps.

    All ranks must call this function. `process` is this rank's process among trainers
    and reader processes, or None if there are no reader processes.
    """
    data = config.data
    masks: DynamicMasks | None = None
    if data.masking == "dynamic":
        masks = on_every_rank(
            info,
            lambda: DynamicMasks(
                reader.set_dir,
                reader.manifest,
                rate=data.masking_rate,
                max_predictions=data.max_predictions,
                seed=derive_seed(seed, "masks"),
            ),
        )
    source = _make_source(config, reader, seed, info, process, masks)
    shapes: tuple[StaticShape, ...] = ()
    if config.run.step_mode == "captured":
        limits = {"max_seqlen": data.max_seq_length, "max_masked": data.max_predictions}
        shapes = plan_shapes(planner, config.max_steps, **limits)

    def make() -> Loader:
        copy = DaliCopy(device) if data.loader == "dali" else None
        staging = Staging(device, copy, shapes)
        return Loader(planner, source, device, first_step=first_step, staging=staging)

    return on_every_rank(info, make), shapes


def _make_source(
    config: RunConfig,
    reader: SampleReader,
    seed: int,
    info: RankInfo,
    process: MpiProcess | None,
    masks: DynamicMasks | None,
) -> BatchSource:
    """Create this rank's batch source, which uses a reader process, an exchange or direct reading.

    All ranks must call this function.
    """
    check_nodes("data.balance", config.data.balance, info, config.parallel.ranks_per_node)
    if process is not None:
        pair = Pair(process.world, process.role.partner)
        source = MpiSource(pair, info.rank, reader.set_dir, masks)
        on_every_rank(info, lambda: source.set_up(seed))
        return source
    group = make_exchange_group(config.data.balance, info, config.parallel.ranks_per_node)
    if group is None:
        return DirectSource(reader, info.rank, masks)
    token = token_dtype(config.model.vocab_size)
    return ExchangeSource(reader, info.rank, group, token, masks)


def run_reader(config: RunConfig, data_dir: Path, process: MpiProcess) -> None:
    """Run this process as the reader process of one trainer until that trainer stops."""
    info = process.role.info
    peers = None
    if (readers := process.peers(config.data.balance)) is not None:
        is_local = config.data.balance == "exchange_local"
        peers = PeerExchange(readers, info.rank - info.local_rank if is_local else 0)

    def open_reader(seed: int) -> StepReader:
        index = open_index(data_dir / "train", config)
        return StepReader(
            make_planner(config, index, seed),
            SampleReader(data_dir / "train", index.manifest),
            info.rank,
            peers,
            token_dtype(config.model.vocab_size),
        )

    serve_trainer(Pair(process.world, process.role.partner), open_reader)


def dismiss_reader(process: MpiProcess) -> None:
    """Stop the reader process of a trainer that has no steps left to train."""
    Pair(process.world, process.role.partner).send(Tag.STOP)
