"""Options that several measurements share, and the model that they describe."""

import argparse
from collections.abc import Collection, Iterable
from typing import get_args

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import AttentionName, Bounds, ModelSection, option_name

HEAD_SIZE = 64  # of every published BERT

# A measurement has some of these; sizes of a model and of a batch have the config's bounds too.
_BOUNDS = {
    **dict.fromkeys(("layers", "hidden", "heads", "batch", "tokens"), Bounds(1, 2**24)),
    "threads": Bounds(1, 4096),
    "steps": Bounds(1, 10**7),
    "vocab": Bounds(2, 2**22),
    "max_length": Bounds(8, 65_535),
    "seed": Bounds(0, 2**63 - 1),
    "seconds": Bounds(1e-3, 1e6),
}


def add_numbers(
    parser: argparse.ArgumentParser,
    rows: Iterable[tuple[str, int | None, str]],
    required: Collection[str] = (),
) -> None:
    """Add integer options: name, default (None: not given) and meaning of each."""
    for name, default, text in rows:
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            required=name in required,
            metavar="N",
            help=text if default is None else f"{text} (default {default})",
        )


def add_attention(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add the choice of our attention policy."""
    parser.add_argument(
        "--attention", choices=get_args(AttentionName), default=default, help="our policy"
    )


def check_numbers(args: argparse.Namespace) -> None:
    """Every shared option within its range. Raises ConfigError."""
    for name, bounds in _BOUNDS.items():
        value = getattr(args, name, None)
        if value is not None:
            bounds.check(option_name(name), value)


def model_of(args: argparse.Namespace) -> ModelSection:
    """The model of --layers, --hidden and so on. Raises ConfigError for one that cannot be."""
    check_numbers(args)
    if not 0 <= args.dropout < 1:
        raise ConfigError("--dropout", f"is {args.dropout:g}", "set it to at least 0 and below 1")
    divisor = HEAD_SIZE if args.heads is None else args.heads
    if args.hidden % divisor:
        problem = f"{args.hidden} cannot be divided by {divisor}"
        remedy = f"use a multiple of {HEAD_SIZE}, or give --heads a divisor of it"
        raise ConfigError("--hidden", problem, remedy)
    return ModelSection(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_layers=args.layers,
        num_heads=args.hidden // HEAD_SIZE if args.heads is None else args.heads,
        intermediate_size=4 * args.hidden,
        max_position_embeddings=args.max_length,
        hidden_dropout=args.dropout,
        attention_dropout=args.dropout,
        attention=args.attention,
    )
