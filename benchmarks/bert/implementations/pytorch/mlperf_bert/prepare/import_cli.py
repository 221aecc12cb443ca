"""`prepare --tfrecord` and `prepare --hdf5`: examples that others made to one prepared set."""

import argparse
from pathlib import Path

from mlperf_bert.prepare.source_options import needed_vocabulary, number, summary, workers

OPTIONS = ("vocab", "max_seq_length", "max_predictions", "workers", "pick_eval")


def add_arguments(parser: argparse.ArgumentParser, source: argparse._ActionsContainer) -> None:
    """Add both sources."""
    source.add_argument(
        "--tfrecord",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="TFRecord files of the reference, plain or gz, one shard each",
    )
    source.add_argument(
        "--hdf5",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="HDF5 files of published submissions: padded, of variable length, or packed",
    )


def run(args: argparse.Namespace) -> int:
    """Import, and say what came of it. Raises ConfigError and DataError."""
    from mlperf_bert.prepare.import_examples import import_set

    manifest = import_set(
        args.hdf5 or args.tfrecord,
        needed_vocabulary(args),
        args.out,
        format_name="hdf5" if args.hdf5 else "tfrecord",
        max_seq_length=number(args, "max_seq_length"),
        max_predictions=number(args, "max_predictions"),
        workers=workers(args),
        pick_eval=args.pick_eval,
    )
    print(summary(args.out, manifest))
    return 0
