"""The sub-command `plan`: arguments of its questions; what answers them is imported when asked."""

import argparse
import importlib
import typing
from pathlib import Path

from bert_tools.plan.answer import show
from bert_tools.plan.cluster import machine
from bert_tools.plan.entries import FILTER_HELP, PUBLISHED
from bert_tools.plan.recipes import ACCELERATORS
from bert_tools.plan.samples_to_target import RECIPES
from mlperf_bert.config.options import FILE_OR_NAME, add_config
from mlperf_bert.config.sections import (
    MAX_PREDICTIONS,
    BalanceModel,
    BalancePolicy,
    ClipPolicy,
    SamplerName,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the questions, which are sub-commands of `plan`."""
    questions = parser.add_subparsers(required=True, metavar="QUESTION")
    for name, add, text in (
        ("balance", _balance, "how even ranks' work is, for every sampler and balance policy"),
        ("buckets", _buckets, "which gradients are sent together, and how early"),
        ("memory", _memory, "what a rank's memory holds; the largest batch"),
        ("suggest", _suggest, "a config for a job of any size"),
        ("law", _law, "how time falls with accelerators, fitted to results"),
        ("cluster", _cluster, "simulate a step and a run on any machine"),
    ):
        question = questions.add_parser(name, help=text)
        add(question)
        question.add_argument("--json", action="store_true", help="print one JSON object")
        module = f"{name}.question" if name == "cluster" else name
        question.set_defaults(answered_by=f"bert_tools.plan.{module}")


def run(args: argparse.Namespace) -> int:
    """Answer the chosen question. Raises ConfigError or DataError for what the user can mend."""
    show(importlib.import_module(args.answered_by).answer(args), args.json)
    return 0


def _balance(parser: argparse.ArgumentParser) -> None:
    add_config(parser, f"in the place of sizes: {FILE_OR_NAME}", required=False)
    _sizes(parser, "sequences of a rank and step", required=False)
    _number(parser, "draws", 60, "steps planned for each row (default 60)")
    _number(parser, "seed", 0, "of the draws (default 0)")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--histogram",
        type=Path,
        metavar="CSV",
        help="how many samples have which length (default: Wikipedia's, at most 512 tokens)",
    )
    lengths.add_argument("--data", type=Path, metavar="DIR", help="a prepared set, or its parent")
    text = f"masked positions of a sample at most, not with --data (default {MAX_PREDICTIONS})"
    _number(parser, "max-predictions", None, text)
    text = "of the run that capacities are for (default: the draws, which are spread over it)"
    _number(parser, "steps", None, text)
    parser.add_argument(
        "--balance-model",
        choices=typing.get_args(BalanceModel),
        help="what the policies make even (default tokens)",
    )
    _number(parser, "cost-a", None, "cost of a token (default 1)", "A", float)
    text = "cost of a token attended by a token (default: by BERT-large's multiply-adds)"
    _number(parser, "cost-b", None, text, "B", float)
    parser.add_argument(
        "--quantiles",
        type=_quantiles,
        metavar="auto|N",
        help="of the sampler 'quantile' (default auto)",
    )
    _picture(parser, "balance_<nodes>x<gpus>x<batch>.png")


def _buckets(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    text = "when a bucket is full (default: parallel.bucket_cap_mb)"
    _number(parser, "bucket-cap-mb", None, text, "MIB", float)
    dtypes = ("fp32", "bf16", "fp16", "fp8")
    parser.add_argument("--dtype", choices=dtypes, help="of the gradients (default: the config's)")
    parser.add_argument(
        "--qkv",
        choices=("separate", "fused"),
        default="separate",
        help="attention's three projections as they are, or as if they were one (default separate)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="draw the timeline")


def _memory(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    text = "as on the GPU's name: 80, 141; then also the largest batch that fits"
    _number(parser, "device-memory", None, text, "GB", float)


def _suggest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes of the job")
    parser.add_argument("--gpus", type=int, required=True, metavar="G", help="GPUs of a node")
    parser.add_argument(
        "--accelerator", choices=ACCELERATORS, default="a100", help="which GPU (default a100)"
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default=RECIPES[0],
        help="whose hyper-parameters: LAMB of the closed division (default), Samsung's Adam, "
        "MosaicML's AdamW without dropout, or the line through the latter two",
    )
    text = "sequences of a rank and forward (default: by the size, docs/scaling.md)"
    _number(parser, "local-batch-size", None, text, "B")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.toml",
        help="the config, a new file (default: named by the size, here)",
    )


def _law(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="MLPerf logs: a directory with result_<n>.txt below it, or some of them (those of a "
        "directory are one system's); a CSV file "
        f"with the columns of the shipped table; or {PUBLISHED!r}, the shipped table itself, "
        "MLPerf BERT v0.7 to v5.0 (default)",
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
    _number(parser, "seed", 0, "of the bootstrap (default 0)")
    _picture(parser, "law.png")


def _cluster(parser: argparse.ArgumentParser) -> None:
    text = f"{FILE_OR_NAME}: the run that is asked about; other options change it"
    add_config(parser, text, required=False)
    _sizes(parser, "sequences of a rank and forward (packed programs: rows of 512)", required=False)
    text = "line rate out of a node, one direction (default: the usual node's)"
    parser.add_argument("--node-bandwidth", dest="node_gb_s", type=float, metavar="GB/S", help=text)
    for name, choices, text in (
        ("accelerator", machine.ACCELERATORS, "(default: the config's name tells, else a100)"),
        ("program", tuple(machine.programs()), "whose code runs (default ours)"),
        ("precision", typing.get_args(machine.MatrixPrecision), "(default bf16)"),
        ("sampler", typing.get_args(SamplerName), "(default uniform)"),
        ("balance", typing.get_args(BalancePolicy), "(default presort_global)"),
        ("clip", typing.get_args(ClipPolicy), "(default after_allreduce)"),
        ("capture", ("on", "off"), "one graph a step (default: as the program does)"),
        (
            *("sharding", typing.get_args(machine.Scope)),
            "ranks that the optimizer's state is cut over (default: as the program does)",
        ),
        ("recipe", RECIPES, "whose samples are expected (default closed_lamb)"),
    ):
        parser.add_argument(f"--{name}", choices=choices, help=text)
    _number(parser, "samples", None, "to the target (default: the recipe's)", kind=float)
    _number(parser, "start-up-s", None, "inside the clock (default 0)", "S", float)
    _number(parser, "skipped-steps", None, "by the loss scale (default 0)")
    text = "samples between two evaluations (default: by the rules)"
    _number(parser, "evaluation-interval", None, text)
    _number(parser, "draws", None, "steps (default 5)")
    _number(parser, "seed", None, "of draws and jitter")
    parser.add_argument(
        "--histogram", type=Path, metavar="CSV", help="of lengths (default: Wikipedia's)"
    )
    parser.add_argument("--ablation", action="store_true", help="what every technique buys")
    parser.add_argument(
        "--sweep",
        nargs="?",
        choices=("local", "global"),
        const="local",
        help="1 node to 100,000 accelerators; the local batch stays (default), or the global one",
    )
    for name, text in (
        ("timeline", "draw one step"),
        ("ablation-plot", "draw it; asks for --ablation too"),
        ("sweep-plot", "draw it; asks for --sweep too"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE.png", help=text)


def _sizes(parser: argparse.ArgumentParser, of_batch: str, *, required: bool = True) -> None:
    for name, text in (
        ("nodes", "nodes of the job"),
        ("gpus-per-node", "ranks of a node"),
        ("local-batch-size", of_batch),
    ):
        parser.add_argument(f"--{name}", type=int, required=required, metavar="N", help=text)


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


def _picture(parser: argparse.ArgumentParser, default: str) -> None:
    picture = parser.add_mutually_exclusive_group()
    text = f"the picture (default ./{default})"
    picture.add_argument("--out", type=Path, metavar="FILE.png", help=text)
    picture.add_argument("--no-plot", action="store_true", help="draw no picture")


def _quantiles(text: str) -> str | int:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}, give 'auto' or a number") from None
