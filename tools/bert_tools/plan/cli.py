"""The sub-command `plan`: the options of its questions. Each answer is imported when needed."""

import argparse
import importlib
import json
from pathlib import Path

from bert_tools.plan.cluster import machine
from bert_tools.plan.entries import FILTER_HELP
from bert_tools.plan.recipes import ACCELERATORS
from mlperf_bert.config.files import add_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the questions, which are sub-commands of `plan`."""
    questions = parser.add_subparsers(required=True, metavar="QUESTION")
    for name, add, text in (
        ("balance", _balance, "show how evenly a config distributes work over the ranks"),
        ("buckets", add_config, "show the gradient buckets, and how early each can be sent"),
        ("suggest", _suggest, "write a config for a job of any size"),
        ("law", _law, "fit a law of time over accelerators to MLPerf results"),
        ("cluster", _cluster, "simulate a training step and a run on any machine"),
    ):
        question = questions.add_parser(name, help=text)
        add(question)
        question.add_argument(
            "--json", action="store_true", help="print the answer as one JSON object"
        )
        module = "cluster.forecast" if name == "cluster" else name
        question.set_defaults(answered_by=f"bert_tools.plan.{module}")


def run(args: argparse.Namespace) -> int:
    """Print the answer and return 0. Raises ConfigError or DataError for a user's mistake."""
    facts, lines = importlib.import_module(args.answered_by).answer(args)
    facts = {"schema_version": 1, **facts}
    print(json.dumps(facts, allow_nan=False) if args.json else "\n".join(lines))
    return 0


def _balance(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    text = "number of steps to plan for each row of the table (default: %(default)s)"
    parser.add_argument("--draws", type=int, default=60, metavar="N", help=text)
    text = (
        "prepared set whose lengths are used, or its parent directory (default: the published "
        "lengths of Wikipedia, at most 512 tokens)"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help=text)


def _suggest(parser: argparse.ArgumentParser) -> None:
    text = "number of nodes in the job"
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help=text)
    text = "number of GPUs per node, each with one rank"
    parser.add_argument("--gpus-per-node", type=int, required=True, metavar="N", help=text)
    parser.add_argument(
        "--accelerator",
        choices=ACCELERATORS,
        default="a100",
        help="kind of GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.toml",
        help="new file to write the config to (default: a name with the size in runs/)",
    )


def _law(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="directory with the MLPerf logs result_<n>.txt of each system in a directory of its "
        "own (default: the published results of MLPerf BERT, v0.7 to v5.0)",
    )
    parser.add_argument(
        "--filter", action="append", default=[], metavar="KEY=VALUE", help=FILTER_HELP
    )


def _cluster(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    text = "kind of GPU (default: the one in the config's name, otherwise a100)"
    parser.add_argument("--accelerator", choices=machine.ACCELERATORS, help=text)
    text = "line rate out of a node in one direction (default: that of the usual node)"
    parser.add_argument("--node-bandwidth", dest="node_gb_s", type=float, metavar="GB/S", help=text)
