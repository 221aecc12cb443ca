"""`prepare --text`: text files with a given vocabulary to one prepared set."""

import argparse
from pathlib import Path

from mlperf_bert.prepare.source_options import (
    needed_vocabulary,
    number,
    segments,
    summary,
    workers,
)


def add_arguments(parser: argparse.ArgumentParser, source: argparse._ActionsContainer) -> None:
    """Add the source, and what only it takes."""
    source.add_argument(
        "--text", nargs="+", type=Path, metavar="FILE", help="UTF-8 text files, one shard each"
    )
    parser.add_argument(
        "--pick-eval",
        type=int,
        metavar="N",
        help="with --text, --tfrecord, --hdf5: keep N examples, evenly out of all (10000)",
    )
    parser.add_argument(
        "--split-sentences",
        action="store_true",
        help="with --text: it is paragraphs, documents apart by an empty line",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare, and say what came of it. Raises ConfigError and DataError."""
    from mlperf_bert.prepare.build import prepare_text

    manifest = prepare_text(
        args.text,
        needed_vocabulary(args),
        args.out,
        max_seq_length=number(args, "max_seq_length"),
        max_predictions=number(args, "max_predictions"),
        dupe_factor=number(args, "dupe_factor"),
        seed=number(args, "seed"),
        workers=workers(args),
        pick_eval=args.pick_eval,
        split_sentences=args.split_sentences,
        segments=segments(args),
    )
    print(summary(args.out, manifest))
    return 0
