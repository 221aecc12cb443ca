"""The sub-command `bench`: its measurements, each in a file of its own."""

import argparse

from bert_tools.bench import (
    against_cli,
    checkpoints_cli,
    cost_cli,
    loader_cli,
    optimizer_cli,
    run_cli,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the measurements, which are sub-commands of `bench`."""
    measurements = parser.add_subparsers(required=True, metavar="MEASUREMENT")
    against_cli.add_arguments(
        measurements.add_parser(
            "against", help="our training step against that of `transformers`, which pads"
        )
    )
    run_cli.add_parsers(measurements)
    checkpoints_cli.add_arguments(
        measurements.add_parser(
            "checkpoints", help="training while a checkpoint is written, against training alone"
        )
    )
    cost_cli.add_arguments(
        measurements.add_parser("cost", help="data.cost_a and data.cost_b of a model, measured")
    )
    loader_cli.add_arguments(
        measurements.add_parser("loader", help="our loader against nvidia-dali's and torch's")
    )
    optimizer_cli.add_arguments(
        measurements.add_parser("optimizer", help="our update against a loop and torch's")
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen measurement. Raises ConfigError for what the user can mend."""
    return int(args.measure(args))
