"""The sub-command `verify`, which checks that prepared data is complete and correct.

The module imports large modules only when the command runs.
"""

import argparse
from pathlib import Path

from mlperf_bert.arguments import describe
from mlperf_bert.machine import usable_cpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `verify` to its parser."""
    describe(
        parser,
        "Check that prepared data are complete and intact, and print a report. The command "
        "reads the sets in a directory and writes no files. It exits with status 2 if anything is "
        "wrong.",
        "mlperf_bert verify my_data --full",
    )
    text = "prepared set, or directory with the prepared sets train/ and eval/"
    parser.add_argument("dir", type=Path, metavar="DIR", help=text)
    parser.add_argument(
        "--full", action="store_true", help="also read every shard and check its samples"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of worker processes for --full (default: one per core)",
    )


def run(args: argparse.Namespace) -> int:
    """Check prepared data, print the report, and return exit status 0.

    Raises DataError if the data has a problem, and ConfigError if an option is wrong.
    """
    from mlperf_bert.prepare.verify import verify

    workers = len(usable_cpus()) if args.workers is None else args.workers
    report = verify(args.dir, full=args.full, workers=workers)
    print(report.to_text(), flush=True)
    report.raise_if_wrong()
    return 0
