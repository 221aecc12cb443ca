"""Defines `prepare --corpus`, which prepares a corpus with sizes that its options specify.

`pretrain` prepares a corpus with the sizes of a config, and then trains.
"""

import argparse
from pathlib import Path

from bert_tools.pretrain.cli import SEED, add_text_options
from mlperf_bert.arguments import describe
from mlperf_bert.config.sections import MAX_PREDICTIONS
from mlperf_bert.errors import ConfigError
from mlperf_bert.machine import usable_cpus
from mlperf_bert.prepare.cli import DUPE_FACTOR, MAX_SEQ_LENGTH

VOCAB_SIZE = 30_522


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `prepare --corpus` to its parser."""
    describe(
        parser,
        "Turn your own text into a prepared set that `train` reads, with a vocabulary and held-out "
        "documents. `pretrain` does the same with sizes from a config, and then trains.",
        "mlperf_bert prepare --corpus my_text --out my_data --max-seq-length 128",
    )
    text = "text file, or directory of text files, to prepare"
    parser.add_argument("--corpus", type=Path, metavar="TEXT", required=True, help=text)
    text = "directory to write train/, eval/ and vocab.txt to"
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help=text)
    add_text_options(parser)
    made = parser.add_argument_group("the examples")

    def number(name: str, default: int | None, text: str) -> None:
        made.add_argument(name, type=int, default=default, metavar="N", help=text)

    made.add_argument(
        "--segments",
        choices=("pair", "single"),
        default="pair",
        help="generate examples of two segments (pair) to predict masked words and the next "
        "sentence, or of one segment (single) to predict only masked words",
    )
    number("--vocab-size", None, f"size of the new vocabulary in tokens (default: {VOCAB_SIZE:,})")
    number("--max-seq-length", MAX_SEQ_LENGTH, "maximum number of tokens in an example")
    number("--max-predictions", MAX_PREDICTIONS, "maximum number of masked positions in an example")
    text = f"number of passes over the text (default: {DUPE_FACTOR}, or 1 with --segments single)"
    number("--dupe-factor", None, text)
    number("--seed", SEED, "seed of the examples")
    number("--workers", len(usable_cpus()), "number of worker processes (default: one per core)")


def run(args: argparse.Namespace) -> int:
    """Prepare the corpus and return the exit status 0.

    Raises ConfigError or DataError for a user's mistake.
    """
    from bert_tools.pretrain.prepare import CorpusRequest, prepare_corpus
    from mlperf_bert.data.index import ShardSettings

    if args.vocab is not None and args.vocab_size is not None:
        raise ConfigError("--vocab-size", "cannot be combined with --vocab", "remove --vocab-size")
    if not args.corpus.exists():
        problem = f"there is no file or directory '{args.corpus}'"
        raise ConfigError("--corpus", problem, "pass a text file, or a directory of text files")
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
