"""`prepare --mlcommons`: the official text to the official sets, on one machine or several."""

import argparse
from pathlib import Path

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.prepare.source_options import summary, workers

OPTIONS = ("vocab", "workers", "parts", "join")


def add_arguments(parser: argparse.ArgumentParser, source: argparse._ActionsContainer) -> None:
    """Add the source, and what only it takes."""
    source.add_argument(
        "--mlcommons",
        type=Path,
        metavar="TEXTDIR",
        help="the official text: part-*-of-00500, eval.txt, vocab.txt",
    )
    parser.add_argument(
        "--parts",
        metavar="A-B",
        help="with --mlcommons: make only the training shards of these parts, from 0 on",
    )
    parser.add_argument(
        "--join",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="with --mlcommons: make the sets of the shards in --out and in these directories",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare, and verify what is complete. Raises ConfigError and DataError."""
    from mlperf_bert.data.index import examples_digest
    from mlperf_bert.prepare import mlcommons
    from mlperf_bert.prepare.verify.check import verify

    if args.parts is not None and args.join is not None:
        raise ConfigError("--join", "does not go with --parts", "join when all parts are made")
    vocab = args.vocab or args.mlcommons / "vocab.txt"
    places = mlcommons.Places(args.mlcommons, vocab, args.out)
    official = mlcommons.OFFICIAL
    if args.parts is not None:
        numbers = mlcommons.parse_parts(args.parts, official)
        made = mlcommons.prepare_parts(places, numbers, workers(args), official)
        num_samples = sum(sidecar.num_samples for sidecar in made)
        print(f"parts {args.parts}: {num_samples:,} examples in {len(made)} shards")
        print(f"examples sha256 {examples_digest(made)}")
        return 0
    if args.join is None:
        mlcommons.check_text(places, workers(args), official)
    held_out = mlcommons.prepare_eval(places, official)
    print(summary(args.out / "eval", held_out), flush=True)
    if args.join is None:
        mlcommons.prepare_parts(places, range(official.parts), workers(args), official)
    train = mlcommons.join_parts(places, args.join or [], official)
    print(summary(args.out / "train", train))
    same = "as" if train.num_samples == official.num_samples else "NOT as"
    print(f"{train.num_samples:,} training examples, {same} published ({official.num_samples:,})")
    report = verify(args.out, full=False, workers=1)
    print(report.to_text(), flush=True)
    report.raise_if_wrong()
    return 0
