"""The sub-command `verify`: its arguments and what they call; heavy imports wait until it runs."""

import argparse
from pathlib import Path

from mlperf_bert.common.machine import usable_cpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `verify`."""
    parser.add_argument(
        "dir", type=Path, metavar="DIR", help="prepared set, or directory with train/ and eval/"
    )
    parser.add_argument(
        "--full", action="store_true", help="read every shard: digests, contents, duplicates"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="with --full: processes (default: the cores of this process)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report; returns 0.

    Raises DataError where a check failed, ConfigError for a wrong option.
    """
    from mlperf_bert.prepare.verify.check import verify

    workers = len(usable_cpus()) if args.workers is None else args.workers
    report = verify(args.dir, full=args.full, workers=workers)
    print(report.to_json() if args.json else report.to_text(), flush=True)
    report.raise_if_wrong()
    return 0
