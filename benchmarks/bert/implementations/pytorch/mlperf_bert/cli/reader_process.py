"""A reader process of `data.loader = "mpi_readers"`: what it is built of, and its whole life."""

from pathlib import Path

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.mpi_pair import Pair, Tag
from mlperf_bert.data.mpi_readers import PeerExchange, WindowReader, serve_trainer
from mlperf_bert.data.open_data import open_index
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.data.token_packets import token_dtype
from mlperf_bert.distributed.reader_roles import MpiProcess
from mlperf_bert.parts.loader import make_planner


def run_reader(config: RunConfig, data_dir: Path, process: MpiProcess) -> None:
    """Be a reader process: read for one trainer until it stops."""
    info = process.role.info
    peers = None
    if (among := process.peers(config.data.balance)) is not None:
        is_local = config.data.balance == "exchange_local"
        peers = PeerExchange(among, info.rank - info.local_rank if is_local else 0)

    def open_reader(seed: int) -> WindowReader:
        index = open_index(data_dir / "train", config)
        return WindowReader(
            make_planner(config, index, seed),
            SampleReader(data_dir / "train", index.manifest),
            info.rank,
            peers,
            window_steps=config.data.exchange_window_steps,
            token=token_dtype(config.model.vocab_size),
        )

    serve_trainer(Pair(process.world, process.role.partner), open_reader)


def dismiss_reader(process: MpiProcess) -> None:
    """As a trainer that has nothing to train: let its reader process end."""
    Pair(process.world, process.role.partner).send(Tag.STOP)
