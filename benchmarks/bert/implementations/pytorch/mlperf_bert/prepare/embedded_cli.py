"""`prepare --embedded`: the small corpus out of the user's own Python, to train/ and eval/."""

import argparse

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.options import find_config
from mlperf_bert.prepare.source_options import number


def add_arguments(parser: argparse.ArgumentParser, source: argparse._ActionsContainer) -> None:
    """Add the source, and what only it takes."""
    source.add_argument(
        "--embedded",
        action="store_true",
        help="make DIR/train and DIR/eval from the documentation of this Python",
    )
    parser.add_argument(
        "--config", type=find_config, metavar="FILE", help="with --embedded: the run's"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="with --embedded: change settings of the config",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare unless it is there. Raises ConfigError and DataError."""
    from mlperf_bert.config.files import load_config
    from mlperf_bert.prepare.corpus import prepare_embedded

    if args.config is None:
        raise ConfigError("--config", "is missing", "--embedded takes its settings from it")
    config = load_config(args.config, args.set)
    was_made = prepare_embedded(
        args.out,
        vocab_size=config.model.vocab_size,
        max_seq_length=config.data.max_seq_length,
        max_predictions=config.data.max_predictions,
        dupe_factor=config.data.dupe_factor,
        seed=number(args, "seed"),
        segments="single" if config.model.objective == "mlm" else "pair",
    )
    if not was_made:
        print(f"{args.out}: already prepared with these settings")
    return 0
