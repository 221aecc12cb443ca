"""The sub-command `network-test`, which checks and times an all-reduce over all ranks."""

import argparse
from datetime import timedelta
from typing import TYPE_CHECKING

from mlperf_bert.arguments import describe
from mlperf_bert.config.files import add_config, load_config

if TYPE_CHECKING:
    import torch

    from mlperf_bert.distributed.launch import RankInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `network-test` to its parser."""
    describe(
        parser,
        "Run an all-reduce over all ranks a few times, check that its sums are right, and print "
        "how fast it was. The command writes no files. Without a launcher, it starts the ranks of "
        "one node itself.",
        "mlperf_bert network-test --config cpu_tiny",
    )
    add_config(parser)


def run(args: argparse.Namespace) -> int:
    """Run the network test, print the result on rank 0, and return exit status 0.

    Without a launcher, the command starts the ranks of one node.

    Raises:
        ConfigError: the config is invalid or cannot run on this machine.
        UserError: the sums of the all-reduce are wrong.
        LostRanksError: ranks cannot reach each other.
    """
    from mlperf_bert.distributed.launch import read_rank_info
    from mlperf_bert.distributed.session import in_session, measure_sums
    from mlperf_bert.distributed.signal_watch import SignalWatch
    from mlperf_bert.distributed.spawn import run_on_ranks

    config = load_config(args.config, args.set)
    parallel = config.parallel
    own_info = read_rank_info()
    if own_info.launcher == "single" and parallel.ranks_per_node > 1:
        return run_on_ranks(args.command_line, parallel.ranks_per_node)

    def run_rank(info: "RankInfo", device: "torch.device") -> int:
        found = measure_sums(info, device)
        if info.rank == 0:
            print(f"all-reduce: {found}", flush=True)
        return 0

    # With `mpi_readers`, half of the processes do not use a GPU in training.
    share = "allow" if config.data.loader == "mpi_readers" else parallel.share_gpu
    patience = timedelta(seconds=config.run.hang_timeout_s)
    with SignalWatch(None, speaks=own_info.rank == 0):
        return in_session(run_rank, config.run.device, share, patience=patience)
