"""The sub-command `plan`: arguments of its questions; each answer is imported when asked."""

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
        (
            "balance",
            _balance,
            "balance of the ranks' work, and what other samplers and policies give",
        ),
        ("buckets", add_config, "gradient buckets, and how early each can be sent"),
        ("suggest", _suggest, "a config for a job of any size"),
        ("law", _law, "law of time over number of accelerators, fitted to results"),
        ("cluster", _cluster, "simulate a step and a run on any machine"),
    ):
        question = questions.add_parser(name, help=text)
        add(question)
        question.add_argument("--json", action="store_true", help="print one JSON object")
        module = "cluster.forecast" if name == "cluster" else name
        question.set_defaults(answered_by=f"bert_tools.plan.{module}")


def run(args: argparse.Namespace) -> int:
    """Answer the chosen question. Raises ConfigError or DataError for a user's mistake."""
    facts, lines = importlib.import_module(args.answered_by).answer(args)
    facts = {"schema_version": 1, **facts}
    print(json.dumps(facts, allow_nan=False) if args.json else "\n".join(lines))
    return 0


def _balance(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    text = "steps planned for each row (default 60)"
    parser.add_argument("--draws", type=int, default=60, metavar="N", help=text)
    text = "a prepared set, or its parent (default: Wikipedia's lengths, at most 512 tokens)"
    parser.add_argument("--data", type=Path, metavar="DIR", help=text)


def _suggest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes in the job")
    text = "GPUs (ranks) per node"
    parser.add_argument("--gpus-per-node", type=int, required=True, metavar="N", help=text)
    parser.add_argument(
        "--accelerator", choices=ACCELERATORS, default="a100", help="the GPU (default a100)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.toml",
        help="the config, a new file (default: runs/, named by the size)",
    )


def _law(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="MLPerf logs, result_<n>.txt, in a directory for each system (default: published "
        "results of MLPerf BERT, v0.7 to v5.0)",
    )
    parser.add_argument(
        "--filter", action="append", default=[], metavar="KEY=VALUE", help=FILTER_HELP
    )


def _cluster(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    text = "the GPU (default: the config's name tells, else a100)"
    parser.add_argument("--accelerator", choices=machine.ACCELERATORS, help=text)
    text = "line rate out of a node, one direction (default: the usual node's)"
    parser.add_argument("--node-bandwidth", dest="node_gb_s", type=float, metavar="GB/S", help=text)
