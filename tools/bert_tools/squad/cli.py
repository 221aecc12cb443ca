"""The sub-command `squad`: fine-tune, compare engines, evaluate, score; each in a file of its own.

Heavy imports wait until one runs.
"""

import argparse

from bert_tools.squad import compare_cli, evaluate_cli, score_cli, train_cli

_PARTS = (
    ("train", train_cli, "fine-tune on questions, by one engine"),
    ("compare", compare_cli, "data parallel, sharded and pipelined training side by side"),
    ("evaluate", evaluate_cli, "answers and scores of a fine-tuned model"),
    ("score", score_cli, "exact match and F1 of a file of answers"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module, text in _PARTS:
        command = commands.add_parser(name, help=text)
        module.add_arguments(command)
        command.set_defaults(squad=module.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen one. Raises UserError for what the user can mend."""
    return int(args.squad(args))
