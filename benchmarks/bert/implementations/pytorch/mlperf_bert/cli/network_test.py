"""The sub-command `network-test`: check that the ranks of a job reach each other, and how fast."""

import argparse
from collections.abc import Sequence

from mlperf_bert.common.errors import FAULT, STOPPED
from mlperf_bert.config.options import add_config
from mlperf_bert.distributed.network_test.findings import Finding, Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `network-test`."""
    add_config(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time limit of the test, and of the wait for a rank (default 60)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings on rank 0, like `doctor --only network`; 0, or 1 if the test fails.

    Without a launcher it starts one node's ranks of the config. Raises ConfigError.
    """
    from mlperf_bert.config.files import load_config
    from mlperf_bert.distributed.launch import read_rank_info
    from mlperf_bert.distributed.network_test.all_ranks import examine
    from mlperf_bert.distributed.spawn import run_on_ranks

    config, info = load_config(args.config, args.set), read_rank_info()
    options = Options(config=config, timeout_s=args.timeout)
    if info.launcher == "single":
        ranks = config.parallel.ranks_per_node
        return run_on_ranks(args.command_line, ranks, agreed_statuses=(FAULT, STOPPED))
    return examine(info, (), options, _print)


def _print(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(finding.line(), flush=True)
