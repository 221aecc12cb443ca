"""`squad compare`: engines side by side, as a table, JSON and two pictures."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tools.squad.options import (
    VOCABULARY,
    DataOptions,
    add_data,
    add_settings,
    data_options,
    settings_of,
)
from mlperf_bert.common.errors import ConfigError, one_line

if TYPE_CHECKING:
    from bert_tools.squad.compare import Begun
    from bert_tools.squad.comparison import Comparison
    from bert_tools.squad.settings import SquadSettings

DEFAULT_ENGINES = "single,ddp:2,fsdp:2,pipeline:2"
_MOST_SEEDS = 100
_TABLE, _JSON = "table.md", "result.json"
_GOODPUT, _TIMELINE = "goodput.png", "timeline.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `squad compare`."""
    parser.add_argument(
        "--engines",
        default=DEFAULT_ENGINES,
        metavar="A,B,...",
        help="single, ddp:N, fsdp:N, pipeline:S, pipeline:Sxddp:R, with @gpipe, @1f1b, "
        "@interleaved or @zero_bubble; the first is what the others are compared with "
        f"(default {DEFAULT_ENGINES})",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="seeds 1 .. N of each (default 3)"
    )
    parser.add_argument(
        "--batches", metavar="A,B,...", help="global batches to sweep, in place of --global-batch"
    )
    parser.add_argument(
        "--rate-rule",
        choices=("square_root", "keep"),
        default="square_root",
        help="how the learning rate follows --batches, from the first on (default square_root)",
    )
    parser.add_argument(
        "--initial-batch",
        type=int,
        metavar="N",
        help="M0 of the statistical efficiency (default: the first global batch)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/squad-compare"),
        metavar="DIR",
        help="runs, table and pictures; gone on with where it is there "
        "(default runs/squad-compare)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_data(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Run what has not ended, then compare; 0, or the status of what stopped it.

    Raises UserError for a mistake in the options, the files or the directory.
    """
    from bert_tools.squad.compare import facts_of, hold_to_comparison, make_jobs, run_jobs
    from bert_tools.squad.comparison import compare_runs
    from bert_tools.squad.machine_peak import PEAK

    batches, settings = _plan(args)
    jobs = make_jobs(args.out, settings, batches, args.rate_rule)
    data = data_options(args)
    begun = hold_to_comparison(args.out, facts_of(data, settings[0]))
    if begun == "other":
        (args.out / PEAK).unlink(missing_ok=True)  # of another model, perhaps
    data = _with_vocabulary(data, args.out, begun)
    conditions = _conditions(args, data, settings[0], batches)
    runs, status = run_jobs(jobs, data)
    if status != 0 and not runs:
        return status
    comparison = compare_runs(_in_order_of_engines(runs, jobs), conditions)
    answer = _write(args.out, comparison)
    if args.json:
        print(json.dumps(answer, allow_nan=False), flush=True)
    else:
        print((args.out / _TABLE).read_text("utf-8"), end="", flush=True)
        print(one_line(f"table, JSON, pictures and runs: {args.out}"))
    return status


def _plan(args: argparse.Namespace) -> "tuple[list[int], list[SquadSettings]]":
    """Batches, and settings at the first of them by seed and engine."""
    from bert_tools.squad.ranks import default_ranks
    from bert_tools.squad.settings import parse_engine

    if not 1 <= args.seeds <= _MOST_SEEDS:
        raise ConfigError("--seeds", f"is {args.seeds}", f"give 1 .. {_MOST_SEEDS}")
    changes: dict[str, Any] = {}
    if args.batches is not None:
        if args.global_batch is not None:
            raise ConfigError("--batches", "is given beside --global-batch", "leave one out")
        batches = _numbers("--batches", args.batches)
        changes["global_batch"] = batches[0]
    engines = [
        parse_engine(name, args.schedule, default_ranks()) for name in args.engines.split(",")
    ]
    settings = [
        settings_of(args, engine, seed, **changes)
        for seed in range(1, args.seeds + 1)
        for engine in engines
    ]
    if args.batches is None:
        batches = [settings[0].global_batch]
    if args.initial_batch is not None and args.initial_batch < 1:
        raise ConfigError("--initial-batch", f"is {args.initial_batch}", "give 1 or more")
    return batches, settings


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and 0 < int(word) < 2**31 for word in words):
        raise ConfigError(option, f"is {text!r}", "give whole numbers, such as 16,32,64")
    numbers = [int(word) for word in words]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(option, f"is {text!r}", "name each once")
    return numbers


def _with_vocabulary(data: DataOptions, out: Path, begun: "Begun") -> DataOptions:
    """One vocabulary for all runs, made once."""
    from dataclasses import replace

    from bert_tools.squad.quick_vocabulary import write_vocabulary

    if data.vocabulary is not None or data.init_checkpoint is not None:
        return data
    path = out / VOCABULARY
    if begun == "other" or not path.exists():
        write_vocabulary(data.train, path)
    return replace(data, vocabulary=path)


def _conditions(
    args: argparse.Namespace, data: DataOptions, settings: "SquadSettings", batches: list[int]
) -> Any:
    from bert_tools.squad.comparison import Conditions
    from bert_tools.squad.machine_peak import peak_of_machine

    peak = peak_of_machine(args.out, data, settings)
    return Conditions(
        initial_batch=args.initial_batch or batches[0],
        peak_tflops=peak.tflops,
        peak_means=peak.means,
    )


def _in_order_of_engines(runs: Any, jobs: Any) -> Any:
    """The runs of the first engine first: it is what the others are compared with."""
    order = [(str(job.settings.engine), job.settings.global_batch) for job in jobs]
    return sorted(runs, key=lambda run: order.index((run.engine, run.global_batch)))


def _write(out: Path, comparison: "Comparison") -> dict[str, Any]:
    """Table, JSON and pictures; the JSON object."""
    from bert_tools.squad.plot import goodput_picture, timeline_picture
    from bert_tools.squad.study import TITLE, published_study
    from bert_tools.squad.table import in_words
    from mlperf_bert.common.atomic import write_file
    from mlperf_bert.common.records import write_json

    pictures = {_GOODPUT: goodput_picture(comparison)}
    first_seed = min(run.seed for run in comparison.runs)
    timelines = timeline_picture([run for run in comparison.runs if run.seed == first_seed])
    if timelines is not None:
        pictures[_TIMELINE] = timelines
    answer = {
        "schema_version": 1,
        **comparison.as_json(),
        "study": {"title": TITLE, "rows": [row.as_json() for row in published_study()]},
        "pictures": [str(out / name) for name in pictures],
    }
    for name, picture in pictures.items():
        write_file(out / name, picture)
    write_file(out / _TABLE, (in_words(comparison) + "\n").encode("utf-8"))
    write_file(out / _JSON, write_json(answer))
    return answer
