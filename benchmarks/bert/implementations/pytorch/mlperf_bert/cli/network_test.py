"""The sub-command `network-test`, which checks and times an all-reduce over all ranks."""

import argparse
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.arguments import describe
from mlperf_bert.config.files import add_config, load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.errors import UserError, say

if TYPE_CHECKING:
    import torch

    from mlperf_bert.distributed.launch import RankInfo

LEAST_SHARE = 0.25  # of parallel.network_gb_s. One of eight ports, or TCP, reaches less.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `network-test` to its parser."""
    describe(
        parser,
        "Run an all-reduce over all ranks a few times, check that its sums are right, and print "
        "how fast it was and over which network. The command fails if the nodes' network is much "
        "slower than parallel.network_gb_s. It keeps no files. Without a launcher, it starts the "
        "ranks of one node itself.",
        "mlperf_bert network-test --config cpu_tiny",
    )
    add_config(parser)
    text = "if the network is too slow, print a warning and exit with status 0"
    parser.add_argument("--warn", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Run the network test, print the result on rank 0, and return exit status 0.

    Without a launcher, the command starts the ranks of one node.

    Raises:
        ConfigError: the config is invalid or cannot run on this machine.
        UserError: the sums of the all-reduce are wrong, or the network is too slow.
        LostRanksError: ranks cannot reach each other.
    """
    from mlperf_bert.distributed.launch import read_rank_info
    from mlperf_bert.distributed.rendezvous import record_nccl
    from mlperf_bert.distributed.session import in_session
    from mlperf_bert.distributed.signal_watch import SignalWatch
    from mlperf_bert.distributed.spawn import run_on_ranks

    config = load_config(args.config, args.set)
    parallel = config.parallel
    own_info = read_rank_info()
    if own_info.launcher == "single" and parallel.ranks_per_node > 1:
        return run_on_ranks(args.command_line, parallel.ranks_per_node)

    with tempfile.TemporaryDirectory(prefix="mlperf_bert_nccl_") as directory:
        nccl_log = Path(directory) / "log"
        record_nccl(nccl_log)

        def run_rank(info: "RankInfo", device: "torch.device") -> int:
            _test(config, info, device, nccl_log, only_warn=args.warn)
            return 0

        # With `mpi_readers`, half of the processes do not use a GPU in training.
        share = "allow" if config.data.loader == "mpi_readers" else parallel.share_gpu
        patience = timedelta(seconds=config.run.hang_timeout_s)
        with SignalWatch(None, speaks=own_info.rank == 0):
            return in_session(run_rank, config.run.device, share, patience=patience)


def _test(
    config: RunConfig, info: "RankInfo", device: "torch.device", nccl_log: Path, *, only_warn: bool
) -> None:
    """Measure the all-reduce, and print the result on rank 0.

    Raises UserError on all ranks if a sum is wrong, or if the network is too slow, unless
    `only_warn` is true.
    """
    import torch.distributed as dist

    from mlperf_bert.distributed.rendezvous import transport
    from mlperf_bert.distributed.sum_check import measure_sums

    if info.world_size == 1:
        print("all-reduce: there is only one rank, so there is nothing to sum", flush=True)
        return
    speed = measure_sums(info, device)
    log = nccl_log.read_text("utf-8", "replace") if nccl_log.exists() else ""
    over = transport(dist.get_backend(), log)
    if info.rank == 0:
        ranks = f"{info.world_size} ranks with {over}"
        print(f"all-reduce: {ranks}: all sums are exact, {speed.in_words}", flush=True)
    expected = config.parallel.network_gb_s
    is_one_node = info.local_world_size == info.world_size
    if expected == "unknown" or is_one_node or speed.bus_gb_s >= LEAST_SHARE * expected:
        return
    share = speed.bus_gb_s / expected
    problem = f"the all-reduce reached {share:.1%} of the {expected:g} GB/s in "
    problem += f"parallel.network_gb_s, with {over}"
    remedy = "check that ranks see all InfiniBand adapters, or correct parallel.network_gb_s"
    error = UserError("network", problem, remedy)
    if not only_warn:
        error.is_of_all_ranks = True
        raise error
    if info.rank == 0:
        say(f"warning: {error}")
