"""The sub-command `prepare --corpus`: prepare a corpus, with its sizes given as options.

`pretrain` does the same with the sizes of a config, and then trains.
"""

import argparse
from pathlib import Path

from bert_tools.pretrain.cli import SEED, add_text_options
from mlperf_bert.config.sections import MAX_PREDICTIONS
from mlperf_bert.errors import ConfigError
from mlperf_bert.machine import usable_cpus
from mlperf_bert.prepare.cli import DUPE_FACTOR, MAX_SEQ_LENGTH

VOCAB_SIZE = 30_522


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `prepare --corpus`."""

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(name, type=int, default=default, metavar="N", help=text)

    parser.add_argument(
        "--corpus",
        type=Path,
        metavar="TEXT",
        required=True,
        help="your text, a directory or a file",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        required=True,
        help="directory to write train/, eval/ and vocab.txt to",
    )
    add_text_options(parser)
    parser.add_argument(
        "--segments",
        choices=("pair", "single"),
        default="pair",
        help="number of segments per example: pair for next-sentence prediction, or single for "
        "masked LM only (default: %(default)s)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"number of tokens in the vocabulary to make (default: {VOCAB_SIZE:,})",
    )
    number(
        "--max-seq-length",
        MAX_SEQ_LENGTH,
        "maximum number of tokens per example (default: %(default)s)",
    )
    number(
        "--max-predictions",
        MAX_PREDICTIONS,
        "maximum number of masked positions per example (default: %(default)s)",
    )
    parser.add_argument(
        "--dupe-factor",
        type=int,
        metavar="N",
        help=f"passes over the text (default: {DUPE_FACTOR}, or 1 with --segments single)",
    )
    number("--seed", SEED, "seed of the examples (default: %(default)s)")
    number(
        "--workers",
        len(usable_cpus()),
        "number of worker processes (default: one per core, %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare the text and return 0. Raises ConfigError or DataError for a user's mistake."""
    from bert_tools.pretrain.files import check_packages
    from bert_tools.pretrain.prepare import CorpusRequest, prepare_corpus
    from mlperf_bert.data.index import ShardSettings

    if args.vocab is not None and args.vocab_size is not None:
        raise ConfigError(
            "--vocab-size", "cannot be combined with --vocab", "leave one of them out"
        )
    if not args.corpus.exists():
        problem = f"there is no file or directory '{args.corpus}'"
        raise ConfigError("--corpus", problem, "pass a directory or a file of text")
    check_packages(args.corpus, args.vocab, args.also)
    passes = 1 if args.segments == "single" else DUPE_FACTOR
    wanted = CorpusRequest(
        source=args.corpus,
        documents=args.documents,
        text_field=args.text_field or "text",
        also=tuple(args.also),
        vocab_path=args.vocab,
        vocab_size=VOCAB_SIZE if args.vocab_size is None else args.vocab_size,
        settings=ShardSettings(
            max_seq_length=args.max_seq_length,
            max_predictions=args.max_predictions,
            dupe_factor=passes if args.dupe_factor is None else args.dupe_factor,
            seed=args.seed,
            segments=args.segments,
        ),
    )
    if not prepare_corpus(wanted, args.out, workers=args.workers):
        print(f"{args.out} is already prepared with these settings")
    return 0
