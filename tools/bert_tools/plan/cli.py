"""The sub-command `plan`: arguments of its questions; each answer is imported when asked."""

import argparse
import importlib
import typing
from pathlib import Path

from bert_tools.plan.answer import show
from bert_tools.plan.cluster import machine
from bert_tools.plan.entries import FILTER_HELP
from bert_tools.plan.recipes import ACCELERATORS
from bert_tools.plan.samples_to_target import RECIPES
from mlperf_bert.config.options import FILE_OR_NAME, add_config
from mlperf_bert.config.sections import BalancePolicy, ClipPolicy, SamplerName


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
        module = f"{name}.question" if name == "cluster" else name
        question.set_defaults(answered_by=f"bert_tools.plan.{module}")


def run(args: argparse.Namespace) -> int:
    """Answer the chosen question. Raises ConfigError or DataError for a user's mistake."""
    show(importlib.import_module(args.answered_by).answer(args), args.json)
    return 0


def _balance(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    _number(parser, "draws", 60, "steps planned for each row (default 60)")
    text = "a prepared set, or its parent (default: Wikipedia's lengths, at most 512 tokens)"
    parser.add_argument("--data", type=Path, metavar="DIR", help=text)


def _suggest(parser: argparse.ArgumentParser) -> None:
    _sizes(parser)
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
    parser.add_argument(
        "--at",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="also print time and cost at N accelerators; may be repeated",
    )
    _picture(parser)


def _cluster(parser: argparse.ArgumentParser) -> None:
    text = f"{FILE_OR_NAME}: the run that is asked about; other options change it"
    add_config(parser, text, required=False)
    _sizes(parser, "sequences per rank and forward (packed programs: rows of 512)")
    text = "line rate out of a node, one direction (default: the usual node's)"
    parser.add_argument("--node-bandwidth", dest="node_gb_s", type=float, metavar="GB/S", help=text)
    for name, choices, text in (
        ("accelerator", machine.ACCELERATORS, "(default: the config's name tells, else a100)"),
        ("program", tuple(machine.programs()), "program to simulate (default ours)"),
        ("precision", typing.get_args(machine.MatrixPrecision), "(default bf16)"),
        ("sampler", typing.get_args(SamplerName), "(default uniform)"),
        ("balance", typing.get_args(BalancePolicy), "(default presort_global)"),
        ("clip", typing.get_args(ClipPolicy), "(default after_allreduce)"),
        ("capture", ("on", "off"), "one CUDA graph per step (default: as the program does)"),
        (
            *("sharding", typing.get_args(machine.Scope)),
            "ranks that share the optimizer's state (default: as the program does)",
        ),
        ("optimizer", typing.get_args(machine.StepOptimizer), "(default: the recipe's)"),
        ("recipe", RECIPES, "recipe for the expected samples (default closed_lamb)"),
    ):
        parser.add_argument(f"--{name}", choices=choices, help=text)
    _number(parser, "samples", None, "samples to the target (default: the recipe's)", kind=float)
    _number(parser, "start-up-s", None, "start-up inside the clock (default 0)", "S", float)
    _number(parser, "skipped-steps", None, "steps without an update (default 0)")
    text = "samples between two evaluations (default: by the rules)"
    _number(parser, "evaluation-interval", None, text)
    _number(parser, "draws", None, "steps (default 5)")
    _number(parser, "seed", None, "seed of draws and jitter")
    parser.add_argument("--ablation", action="store_true", help="gain of each technique")
    parser.add_argument(
        "--sweep",
        nargs="?",
        choices=("local", "global"),
        const="local",
        help="1 node to 100,000 accelerators; the local batch stays (default), or the global one",
    )


def _sizes(parser: argparse.ArgumentParser, of_batch: str = "") -> None:
    """The sizes of a job; without a batch that a config could say in their place, needed."""
    for name, text in (
        ("nodes", "nodes in the job"),
        ("gpus-per-node", "GPUs (ranks) per node"),
    ):
        parser.add_argument(f"--{name}", type=int, required=not of_batch, metavar="N", help=text)
    if of_batch:
        _number(parser, "local-batch-size", None, of_batch)


def _number(
    parser: argparse.ArgumentParser,
    name: str,
    default: float | None,
    text: str,
    metavar: str = "N",
    kind: type = int,
) -> None:
    kind = float if isinstance(default, float) else kind
    parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)


def _picture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="also draw a picture")
