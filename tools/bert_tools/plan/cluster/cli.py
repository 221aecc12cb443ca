"""The question `plan cluster`: its arguments, and what they call; numpy waits until it runs."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bert_tools.common.figures import check_picture
from bert_tools.plan.cluster.machine import ACCELERATORS, MatrixPrecision
from bert_tools.plan.cluster.software import SOFTWARE_NAMES, Sharding
from bert_tools.plan.samples_to_target import RECIPES
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import BalancePolicy, ClipPolicy, SamplerName

if TYPE_CHECKING:
    from bert_tools.plan.cluster.question import Answer, Question
    from bert_tools.plan.sample_index import SampleIndex

_PRECISIONS: tuple[MatrixPrecision, ...] = get_args(MatrixPrecision)
_PICTURES = ("timeline", "ablation_plot", "sweep_plot")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the question."""
    for name, text in (
        ("nodes", "nodes of the job"),
        ("gpus-per-node", "ranks of a node"),
        ("local-batch-size", "sequences of a rank and step (rows of 512 for packed programs)"),
    ):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="N", help=text)
    parser.add_argument("--accelerator", choices=ACCELERATORS, default="a100")
    parser.add_argument(
        "--node-bandwidth",
        type=float,
        metavar="GB/S",
        help="line rate out of a node, one direction (default: the usual node's)",
    )
    _add_program(parser)
    _add_run(parser)
    parser.add_argument("--ablation", action="store_true", help="what every technique buys")
    parser.add_argument(
        "--sweep",
        nargs="?",
        choices=("local", "global"),
        const="local",
        help="1 node to 100,000 accelerators; the local batch stays (default), or the global one",
    )
    parser.add_argument("--timeline", type=Path, metavar="FILE.png", help="draw one step")
    parser.add_argument(
        "--ablation-plot", type=Path, metavar="FILE.png", help="draw it; asks for --ablation too"
    )
    parser.add_argument(
        "--sweep-plot", type=Path, metavar="FILE.png", help="draw it; asks for --sweep too"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(answer=answer_cluster)


def _add_program(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--program", choices=SOFTWARE_NAMES, default="ours", help="whose code runs (default ours)"
    )
    parser.add_argument("--precision", choices=_PRECISIONS, default="bf16")
    parser.add_argument("--sampler", choices=get_args(SamplerName), default="uniform")
    parser.add_argument("--balance", choices=get_args(BalancePolicy), default="presort_global")
    parser.add_argument("--clip", choices=get_args(ClipPolicy), default="bucket_before_allreduce")
    parser.add_argument(
        "--capture", choices=("on", "off"), help="one graph a step (default: as the program does)"
    )
    parser.add_argument(
        "--sharding",
        choices=get_args(Sharding),
        help="ranks that the optimizer's state is cut over (default: as the program does)",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", choices=RECIPES, default="closed_lamb")
    parser.add_argument(
        "--samples", type=float, metavar="N", help="to the target (default: the recipe's)"
    )
    parser.add_argument(
        "--start-up-s", type=float, default=0.0, metavar="S", help="inside the clock (default 0)"
    )
    parser.add_argument(
        "--skipped-steps", type=int, default=0, metavar="N", help="by the loss scale (default 0)"
    )
    parser.add_argument(
        "--evaluation-interval",
        type=int,
        metavar="N",
        help="samples between two evaluations (default: by the rules)",
    )
    parser.add_argument("--draws", type=int, default=5, metavar="N", help="steps (default 5)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of draws and jitter")
    parser.add_argument(
        "--histogram", type=Path, metavar="CSV", help="of lengths (default: Wikipedia's)"
    )


def answer_cluster(args: argparse.Namespace) -> int:
    """Simulate and print. Raises ConfigError or DataError for what the user can mend."""
    from bert_tools.plan.cluster.ablation import ablation
    from bert_tools.plan.cluster.constants import default_constants
    from bert_tools.plan.cluster.question import answer
    from bert_tools.plan.cluster.sweep import sweep
    from bert_tools.plan.cluster.text import ablation_in_words, answer_in_words, sweep_in_words

    question = _question(args)
    _check_pictures({"--" + name.replace("_", "-"): getattr(args, name) for name in _PICTURES})
    index, constants = _index(args), default_constants()
    found = answer(question, index, constants)
    ablated = ablation(found, index, constants) if args.ablation or args.ablation_plot else []
    swept = []
    if args.sweep or args.sweep_plot:
        swept = list(sweep(question, args.sweep or "local", index, constants))
        if not swept:
            problem = "no size of 1 node to 100,000 accelerators can deal this batch"
            remedy = "use the sampler 'quantile', which any batch can represent"
            raise ConfigError("--sweep", problem, remedy)
    if args.json:
        print(json.dumps(_as_object(args, found, ablated, swept)), flush=True)
    else:
        lines = answer_in_words(found)
        lines += ["", *ablation_in_words(ablated)] if ablated else []
        lines += ["", *sweep_in_words(swept, question.gpus_per_node)] if swept else []
        print("\n".join(lines), flush=True)
    _draw(args, found, ablated, swept)
    return 0


def _question(args: argparse.Namespace) -> "Question":
    from bert_tools.plan.cluster.question import Question

    return Question(
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        local_batch_size=args.local_batch_size,
        accelerator=args.accelerator,
        node_gb_s=args.node_bandwidth,
        program=args.program,
        capture=args.capture,
        sharding=args.sharding,
        precision=args.precision,
        sampler=args.sampler,
        balance=args.balance,
        clip=args.clip,
        recipe=args.recipe,
        samples=args.samples,
        start_up_s=args.start_up_s,
        skipped_steps=args.skipped_steps,
        evaluation_interval=args.evaluation_interval,
        draws=args.draws,
        seed=args.seed,
    )


def _index(args: argparse.Namespace) -> "SampleIndex":
    from bert_tools.plan.sample_index import SampleIndex
    from mlperf_bert.config.sections import MAX_PREDICTIONS
    from mlperf_bert.data.length_histogram import read_histogram, wikipedia_lengths

    if args.histogram is None:
        lengths, source = wikipedia_lengths(), "Wikipedia's lengths"
    else:
        lengths, source = read_histogram(args.histogram), str(args.histogram)
    return SampleIndex.of_histogram(lengths, source, MAX_PREDICTIONS)


def _check_pictures(paths: dict[str, Path | None]) -> None:
    """Before minutes are spent. Raises ConfigError, or DataError where one cannot be written."""
    seen: dict[str, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        check_picture(path, option)
        other = seen.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigError(option, f"{path} is the file of {other} too", "name another file")


def _as_object(
    args: argparse.Namespace, found: "Answer", ablated: list[Any], swept: list[Any]
) -> dict[str, Any]:
    question, run = found.question, found.run
    timing = found.timings[0]
    return {
        "schema_version": 1,
        "kind": "simulation",
        **asdict(question),
        "world_size": question.world_size,
        "global_batch_size": question.global_batch_size,
        "step_ms": run.step_ms,
        "parts_ms": found.parts_ms,
        "communication_ms": found.mean_ms("communication_ms"),
        "exposed_ms": found.mean_ms("exposed_ms"),
        "imbalance_tokens": found.imbalance_tokens,
        "padding_fraction": found.padding_fraction,
        "sequences_per_s": found.sequences_per_s,
        "slowest_rank": timing.slowest_rank,
        "median_rank": timing.median_rank,
        "run": asdict(run) | {"seconds": run.seconds, "steady_step_ms": run.steady_step_ms},
        "samples_to_target": asdict(found.estimate),
        "ablation": [asdict(row) for row in ablated],
        "sweep": [asdict(row) for row in swept],
        **{
            name: None if getattr(args, name) is None else str(getattr(args, name))
            for name in _PICTURES
        },
    }


def _draw(args: argparse.Namespace, found: "Answer", ablated: list[Any], swept: list[Any]) -> None:
    if not any(getattr(args, name) for name in _PICTURES):
        return
    from bert_tools.plan.cluster.plot import ablation_picture, sweep_picture, timeline_picture
    from mlperf_bert.common.atomic import write_file

    if args.timeline:
        write_file(args.timeline, timeline_picture(found))
    if args.ablation_plot:
        write_file(args.ablation_plot, ablation_picture(found, ablated))
    if args.sweep_plot:
        kept = args.sweep or "local"
        name = (
            f"{found.question.local_batch_size} a rank"
            if kept == "local"
            else (f"global batch {found.question.global_batch_size:,}")
        )
        write_file(args.sweep_plot, sweep_picture({name: swept}))
