"""The sub-command `plan`: its arguments and what they call; heavy imports wait until it runs."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bert_tools.plan.buckets_cli import add_buckets
from bert_tools.plan.cluster.cli import add_cluster
from bert_tools.plan.law_cli import add_law
from bert_tools.plan.memory_cli import add_memory
from bert_tools.plan.suggest_cli import add_suggest
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import MAX_PREDICTIONS, ModelSection

if TYPE_CHECKING:
    from bert_tools.plan.balance_rows import Question
    from bert_tools.plan.sample_index import SampleIndex

MOST_STEPS = 2**31 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the questions, which are sub-commands of `plan`."""
    questions = parser.add_subparsers(required=True, metavar="QUESTION")
    balance = questions.add_parser(
        "balance", help="how even ranks' work is, for every sampler and balance policy"
    )
    for name, default, text in (
        ("nodes", None, "nodes of the job"),
        ("gpus-per-node", None, "ranks of a node"),
        ("local-batch-size", None, "sequences of a rank and step"),
        ("draws", 60, "steps planned for each row"),
        ("seed", 0, "of the draws"),
    ):
        balance.add_argument(
            f"--{name}",
            type=int,
            default=default,
            required=default is None,
            metavar="N",
            help=text if default is None else f"{text} (default {default})",
        )
    _add_lengths(balance)
    balance.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="of the run that capacities are for (default: the draws, which are spread over it)",
    )
    _add_cost(balance)
    balance.add_argument(
        "--quantiles",
        type=_quantiles,
        default="auto",
        metavar="auto|N",
        help="of the sampler 'quantile' (default auto)",
    )
    picture = balance.add_mutually_exclusive_group()
    picture.add_argument(
        "--out",
        type=Path,
        metavar="FILE.png",
        help="the picture (default ./balance_<nodes>x<gpus>x<batch>.png)",
    )
    picture.add_argument("--no-plot", action="store_true", help="draw no picture")
    balance.add_argument("--json", action="store_true", help="print one JSON object")
    balance.set_defaults(answer=_balance)
    add_buckets(
        questions.add_parser("buckets", help="which gradients are sent together, and how early")
    )
    add_memory(questions.add_parser("memory", help="what a rank's memory holds; the largest batch"))
    add_suggest(questions.add_parser("suggest", help="a config for a job of any size"))
    add_law(questions.add_parser("law", help="how time falls with accelerators, fitted to results"))
    add_cluster(questions.add_parser("cluster", help="simulate a step and a run on any machine"))


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--histogram",
        type=Path,
        metavar="CSV",
        help="how many samples have which length (default: Wikipedia's, at most 512 tokens)",
    )
    lengths.add_argument("--data", type=Path, metavar="DIR", help="a prepared set, or its parent")
    parser.add_argument(
        "--max-predictions",
        type=int,
        metavar="N",
        help=f"masked positions of a sample at most, not with --data (default {MAX_PREDICTIONS})",
    )


def _add_cost(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--balance-model",
        choices=("tokens", "cost"),
        default="tokens",
        help="what the policies make even (default tokens)",
    )
    parser.add_argument(
        "--cost-a", type=float, default=1.0, metavar="A", help="cost of a token (default 1)"
    )
    parser.add_argument(
        "--cost-b",
        type=float,
        metavar="B",
        help="cost of a token attended by a token (default: by BERT-large's multiply-adds)",
    )


def run(args: argparse.Namespace) -> int:
    """Answer the chosen question. Raises ConfigError or DataError for what the user can mend."""
    return int(args.answer(args))


def _balance(args: argparse.Namespace) -> int:
    from bert_tools.plan.balance_plot import balance_picture
    from bert_tools.plan.balance_rows import make_samplers, measure, policies
    from bert_tools.plan.balance_text import in_words
    from mlperf_bert.common.atomic import write_file
    from mlperf_bert.common.console import Counted

    question = _question(args)
    _check_quantiles(question)
    picture = _picture(args)
    index = _index(args)
    if question.global_batch_size > len(index.lengths):
        problem = f"makes a global batch of {question.global_batch_size:,}"
        remedy = f"lower it or the ranks: {index.source} has {len(index.lengths):,} samples"
        raise ConfigError("--local-batch-size", problem, remedy)
    samplers, left_out = make_samplers(index, question)
    total = len(samplers) * len(policies(question)) * question.draws
    with Counted("planned", "steps", total) as progress:
        rows = list(measure(index, question, samplers, progress.advance))
    answer = {"schema_version": 1, **asdict(question)} | {
        "source": index.source,
        "samples": len(index.lengths),
        "mean_length": index.mean_length,
        "left_out": [asdict(each) for each in left_out],
        "picture": None if picture is None else str(picture),
        "rows": [asdict(row) for row in rows],
    }
    # Before the picture: where that fails, the measured rows are not lost.
    print(
        json.dumps(answer) if args.json else in_words(index, question, rows, left_out), flush=True
    )
    if picture:
        write_file(picture, balance_picture(question, rows))
    if not args.json:
        print(f"picture: {picture}" if picture else "no picture was asked for")
    return 0


def _question(args: argparse.Namespace) -> "Question":
    """What is asked. Raises ConfigError for an option that cannot be."""
    from bert_tools.plan.balance_rows import Question
    from mlperf_bert.data.balance import CostModel

    lowest = dict.fromkeys(("nodes", "gpus_per_node", "local_batch_size"), 1)
    for name, limit in (lowest | {"draws": 2, "seed": 0}).items():
        value = getattr(args, name)
        if value < limit:
            option = "--" + name.replace("_", "-")
            raise ConfigError(option, f"is {value}", f"set it to {limit} at least")
    steps = args.draws if args.steps is None else args.steps
    if not args.draws <= steps <= MOST_STEPS:
        remedy = f"set it within {args.draws} (--draws) .. {MOST_STEPS}"
        raise ConfigError("--steps", f"is {steps}", remedy)
    share = ModelSection().attention_share
    cost_b = args.cost_a * share if args.cost_b is None else args.cost_b
    if not 0 < args.cost_a < float("inf"):
        raise ConfigError("--cost-a", f"is {args.cost_a:g}", "set it to a finite number above zero")
    if not 0 <= cost_b < float("inf"):
        raise ConfigError("--cost-b", f"is {cost_b:g}", "set it to a finite number of at least 0")
    return Question(
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        local_batch_size=args.local_batch_size,
        draws=args.draws,
        steps=steps,
        seed=args.seed,
        balance_model=args.balance_model,
        cost=CostModel(linear=args.cost_a, quadratic=cost_b),
        quantiles=args.quantiles,
    )


def _check_quantiles(question: "Question") -> None:
    """Asked for by number, they must serve the batch. Raises ConfigError."""
    number, batch = question.quantiles, question.global_batch_size
    if number != "auto" and (number < 1 or batch % number):
        problem = f"{number} does not divide the global batch of {batch:,}"
        raise ConfigError("--quantiles", problem, "give a divisor of it, or 'auto'")


def _index(args: argparse.Namespace) -> "SampleIndex":
    from bert_tools.plan.sample_index import SampleIndex
    from mlperf_bert.data.length_histogram import read_histogram, wikipedia_lengths

    most = args.max_predictions
    if args.data is not None:
        if most is not None:
            remedy = "leave it out: the set says how many positions are masked"
            raise ConfigError("--max-predictions", "does not go with --data", remedy)
        return SampleIndex.of_set(args.data)
    if most is None:
        most = MAX_PREDICTIONS
    if not 1 <= most <= 255:
        raise ConfigError("--max-predictions", f"is {most}", "set it within 1 .. 255")
    if args.histogram is None:
        return SampleIndex.of_histogram(wikipedia_lengths(), "Wikipedia's lengths", most)
    return SampleIndex.of_histogram(read_histogram(args.histogram), str(args.histogram), most)


def _picture(args: argparse.Namespace) -> Path | None:
    """Where the picture goes, tried before minutes are spent on measuring. Raises as that does."""
    from bert_tools.common.figures import check_picture

    if args.no_plot:
        return None
    name = f"balance_{args.nodes}x{args.gpus_per_node}x{args.local_batch_size}.png"
    path = check_picture(args.out or Path(name))
    if args.histogram and os.path.realpath(path) == os.path.realpath(args.histogram):
        remedy = "name a .png file in a directory that exists"
        raise ConfigError("--out", f"{path} is the file of --histogram", remedy)
    return path


def _quantiles(text: str) -> str | int:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}, give 'auto' or a number") from None
