"""The sub-command `prepare`: its arguments and what they call; heavy imports wait until it runs."""

import argparse
from pathlib import Path

from mlperf_bert.errors import ConfigError
from mlperf_bert.machine import usable_cpus

TEXT_DEFAULTS = (
    ("max_seq_length", 512, "tokens of an example at most"),
    ("max_predictions", 76, "masked positions of an example at most"),
    ("dupe_factor", 10, "passes over the text"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `prepare`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text", nargs="+", type=Path, metavar="FILE", help="UTF-8 text files, one shard each"
    )
    source.add_argument(
        "--embedded",
        action="store_true",
        help="make DIR/train and DIR/eval from the documentation of this Python",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("--vocab", type=Path, metavar="FILE", help="with --text: the vocabulary")
    for name, value, text in TEXT_DEFAULTS:
        option = "--" + name.replace("_", "-")
        parser.add_argument(
            option, type=int, metavar="N", help=f"with --text: {text} (default {value})"
        )
    parser.add_argument("--seed", type=int, default=12345, metavar="N", help="default 12345")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes (default: the cores of this process)"
    )
    parser.add_argument(
        "--pick-eval", type=int, metavar="N", help="keep N examples, evenly out of all (10000)"
    )
    parser.add_argument(
        "--split-sentences",
        action="store_true",
        help="the text is paragraphs, documents apart by an empty line",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="with --embedded: the run's")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="with --embedded: change settings of the config",
    )


def run(args: argparse.Namespace) -> int:
    """Run `prepare`. Raises ConfigError or DataError for what the user can mend."""
    return _run_embedded(args) if args.embedded else _run_text(args)


def _run_embedded(args: argparse.Namespace) -> int:
    from mlperf_bert.config_io import load_config
    from mlperf_bert.prepare.corpus import prepare_embedded

    if args.config is None:
        raise ConfigError("--config", "is missing", "--embedded takes its settings from it")
    text_only = ("vocab", "workers", "pick_eval", *(name for name, _, _ in TEXT_DEFAULTS))
    _refuse(args, text_only, "it goes with --text; use --set for the config's settings")
    if args.split_sentences:
        raise ConfigError("--split-sentences", "does not go with --embedded", "leave it out")
    config = load_config(args.config, args.set)
    was_made = prepare_embedded(
        args.out,
        vocab_size=config.model.vocab_size,
        max_seq_length=config.data.max_seq_length,
        max_predictions=config.data.max_predictions,
        dupe_factor=config.data.dupe_factor,
        seed=args.seed,
    )
    if not was_made:
        print(f"{args.out}: already prepared with these settings")
    return 0


def _run_text(args: argparse.Namespace) -> int:
    from mlperf_bert.prepare.build import prepare_text

    if args.vocab is None:
        raise ConfigError("--vocab", "is missing", "give the model's vocab.txt")
    _refuse(args, ("config", "set"), "it goes with --embedded; leave it out")
    sizes: dict[str, int] = {
        name: value if getattr(args, name) is None else getattr(args, name)
        for name, value, _ in TEXT_DEFAULTS
    }
    manifest = prepare_text(
        args.text,
        args.vocab,
        args.out,
        max_seq_length=sizes["max_seq_length"],
        max_predictions=sizes["max_predictions"],
        dupe_factor=sizes["dupe_factor"],
        seed=args.seed,
        workers=len(usable_cpus()) if args.workers is None else args.workers,
        pick_eval=args.pick_eval,
        split_sentences=args.split_sentences,
    )
    num_tokens = sum(length * count for length, count in enumerate(manifest.length_histogram))
    print(
        f"{args.out}: {manifest.num_samples} examples in {len(manifest.shards)} shards, "
        f"mean length {num_tokens / manifest.num_samples:.1f}"
    )
    return 0


def _refuse(args: argparse.Namespace, names: tuple[str, ...], remedy: str) -> None:
    for name in names:
        if getattr(args, name) not in (None, []):
            option = "--" + name.replace("_", "-")
            raise ConfigError(option, "does not go with these options", remedy)
