"""`prepare --corpus`: a user's own text, cleaned and split, to train/, eval/ and a vocabulary."""

import argparse
from pathlib import Path

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.prepare.source_options import number, segments, workers

OPTIONS = ("vocab_size", "documents", "text_field", "held_out")
VOCAB_SIZE = 30_522


def add_arguments(parser: argparse.ArgumentParser, source: argparse._ActionsContainer) -> None:
    """Add the source, and what only it takes."""
    source.add_argument(
        "--corpus",
        type=Path,
        metavar="PATH",
        help="your own text: a directory or a file of plain text or JSON lines, packed or not",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"with --corpus: tokens of a vocabulary made of it (default {VOCAB_SIZE:,})",
    )
    parser.add_argument(
        "--documents",
        choices=("empty-line", "line", "file"),
        help="with --corpus: where a document of plain text ends (default empty-line)",
    )
    parser.add_argument(
        "--text-field", metavar="NAME", help="with --corpus: of JSON lines (default text)"
    )
    parser.add_argument(
        "--held-out",
        type=float,
        metavar="SHARE",
        help="with --corpus: of the documents (default: 1/16, less of more than 128 MB)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare unless it is there. Raises ConfigError and DataError."""
    from mlperf_bert.prepare.own_request import OwnText
    from mlperf_bert.prepare.own_text import prepare_own_text

    if args.vocab is not None and args.vocab_size is not None:
        raise ConfigError("--vocab-size", "does not go with --vocab", "leave one of them out")
    wanted = OwnText(
        source=args.corpus,
        documents=args.documents or "empty-line",
        text_field=args.text_field or "text",
        held_out_share=args.held_out,
        vocab_path=args.vocab,
        vocab_size=VOCAB_SIZE if args.vocab_size is None else args.vocab_size,
        max_seq_length=number(args, "max_seq_length"),
        max_predictions=number(args, "max_predictions"),
        dupe_factor=number(args, "dupe_factor"),
        seed=number(args, "seed"),
        segments=segments(args),
    )
    if not prepare_own_text(wanted, args.out, workers=workers(args)):
        print(f"{args.out}: already prepared with these settings")
    return 0
