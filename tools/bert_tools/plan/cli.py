"""Defines the sub-command `plan`, which imports only the code that answers the given question."""

import argparse
import importlib
import json
from pathlib import Path

from bert_tools.plan.cluster import machine
from bert_tools.plan.entries import FILTER_HELP
from bert_tools.plan.recipes import ACCELERATORS
from mlperf_bert.arguments import add_command
from mlperf_bert.config.files import add_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one sub-command to the parser of `plan` for each question that it answers."""
    parser.description = "Predict properties of a run before it starts. Nothing is trained."
    questions = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, add, text, description, example in _QUESTIONS:
        question = add_command(questions, name, text, description, f"mlperf_bert plan {example}")
        add(question)
        question.add_argument(
            "--json", action="store_true", help="print the answer as one JSON object"
        )
        module = "cluster.forecast" if name == "cluster" else name
        question.set_defaults(answered_by=f"bert_tools.plan.{module}")


def run(args: argparse.Namespace) -> int:
    """Print the answer to the chosen question and return the exit status 0.

    Raises ConfigError or DataError for a user's mistake.
    """
    facts, lines = importlib.import_module(args.answered_by).answer(args)
    facts = {"schema_version": 1, **facts}
    print(json.dumps(facts, allow_nan=False) if args.json else "\n".join(lines))
    return 0


def _balance(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    text = "number of steps to plan for each combination of sampler and balance policy"
    parser.add_argument("--draws", type=int, default=60, metavar="N", help=text)
    text = (
        "prepared set or its parent directory, whose sample lengths are used (default: Wikipedia's)"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help=text)


def _suggest(parser: argparse.ArgumentParser) -> None:
    text = "number of machines"
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help=text)
    text = "number of GPUs per machine, each of which gets one rank"
    parser.add_argument("--gpus-per-node", type=int, required=True, metavar="N", help=text)
    text = "type of the GPUs that the config is for"
    parser.add_argument("--accelerator", choices=ACCELERATORS, default="a100", help=text)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.toml",
        help="new file for the config (default: a file in runs/ named after the job's size)",
    )


def _law(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="directory of MLPerf logs, result_<n>.txt, with a subdirectory per system (default: "
        "use the published results of MLPerf BERT, v0.7 to v5.0)",
    )
    parser.add_argument(
        "--filter", action="append", default=[], metavar="KEY=VALUE", help=FILTER_HELP
    )


def _cluster(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    text = "type of the GPUs to simulate (default: the type in the config's name, otherwise a100)"
    parser.add_argument("--accelerator", choices=machine.ACCELERATORS, help=text)
    text = (
        "network bandwidth of a machine per direction, in GB/s (default: that of a usual machine)"
    )
    parser.add_argument("--node-bandwidth", dest="node_gb_s", type=float, metavar="GB/S", help=text)


_QUESTIONS = (
    (
        "balance",
        _balance,
        "predict how evenly the ranks are loaded",
        "Predict how evenly a config shares the tokens of a batch among its ranks, and compare it "
        "with other samplers and policies. It reads the lengths of the examples only.",
        "balance --config h100_8x8x48x1",
    ),
    (
        "buckets",
        add_config,
        "list gradient buckets and when each can be sent",
        "List the gradient buckets of a config's model, their sizes, and how early in the backward "
        "pass each can be sent.",
        "buckets --config h100_8x8x48x1",
    ),
    (
        "suggest",
        _suggest,
        "write a config for a job of any size",
        "Write a config for a job of any size, with hyper-parameters from published runs of the "
        "nearest batch sizes, and print where each value comes from.",
        "suggest --nodes 4 --gpus-per-node 8 --accelerator h100",
    ),
    (
        "law",
        _law,
        "fit training time over the number of accelerators",
        "Fit a power law of training time over the number of accelerators to published results, or "
        "to your own MLPerf logs, and print it.",
        "law --filter submitter=NVIDIA --filter division=closed",
    ),
    (
        "cluster",
        _cluster,
        "simulate a training step and a run on a cluster",
        "Simulate a training step of a config on a cluster, and predict the time to train. It "
        "needs no GPU.",
        "cluster --config dgxa100_128x8x4x1",
    ),
)
