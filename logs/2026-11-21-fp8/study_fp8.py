"""Does the encoder learn as well with its matrix products in FP8? Accuracy curves beside bf16's.

    python study_fp8.py run --data DATA --out DIR
    python study_fp8.py table --out DIR

DATA holds the prepared sets: `mlperf_bert prepare --embedded --config CONFIG --out DATA`, where
CONFIG is `configs/cpu_tiny.toml` or what --config names. `run` trains with each precision, seed
after seed, on one core, and writes one file DIR/runs/<run>.json each when it is finished; started
again, it goes on with what is missing. The FP8 products are torch's own for a CPU, so they round as
a GPU's do. `table` prints what was found as Markdown and writes DIR/table.md and DIR/fp8.png.
"""

import argparse
import contextlib
import io
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from mlperf_bert.__main__ import main as run_command
from mlperf_bert.common.atomic import make_directory, remove_temporaries, write_file
from mlperf_bert.common.errors import TARGET_MISSED, DataError, UserError
from mlperf_bert.config.files import config_to_tables, load_config

IMPLEMENTATION = Path(__file__).parents[2] / "benchmarks" / "bert" / "implementations" / "pytorch"
CONFIG = IMPLEMENTATION / "configs" / "cpu_tiny.toml"
PRECISIONS = ("bf16", "fp8")
SEEDS = tuple(range(1, 7))
MAX_STEPS = 1500  # all runs together take about 40 minutes of a core
COLUMNS = 8  # of the table: evaluations at equal distances, the last one at the end
Curve = dict[int, float]  # samples: accuracy
Curves = dict[str, dict[int, Curve]]  # by precision and seed


def options(precision: str, seed: int, max_steps: int) -> list[str]:
    """What a run changes in the config: one rank, so that one core will do; no early end."""
    return [
        f"run.seed={seed}",
        f"run.max_steps={max_steps}",
        "parallel.ranks_per_node=1",
        "parallel.local_batch_size=32",
        f"model.precision={precision}",
        "eval.target_accuracy=0.99",
        "checkpoint.save=never",
    ]


def campaign(args: argparse.Namespace) -> None:
    """Run what is missing; a file that is there is a run that was finished."""
    runs = args.out / "runs"
    make_directory(runs)
    wanted = [(precision, seed) for seed in args.seeds for precision in PRECISIONS]
    remove_temporaries(runs, [f"{_name(*each)}.json" for each in wanted])
    missing = [each for each in wanted if not _is_finished(*each, args)]
    print(f"{len(missing)} of {len(wanted)} runs to do", flush=True)
    for precision, seed in missing[: args.limit]:
        result = train(precision, seed, args)
        write_file(runs / f"{_name(precision, seed)}.json", json.dumps(result).encode())
        accuracy, skipped = result["curve"][-1][1], result["skipped_steps"]
        words = f"{accuracy:.4f}, {skipped} steps skipped ({result['seconds']:.0f} s)"
        print(f"{_name(precision, seed)}: {words}", flush=True)


def _name(precision: str, seed: int) -> str:
    return f"{precision}-seed{seed}"


def _is_finished(precision: str, seed: int, args: argparse.Namespace) -> bool:
    path = args.out / "runs" / f"{_name(precision, seed)}.json"
    if not path.exists():
        return False
    config = load_config(args.config, options(precision, seed, args.max_steps))
    if _read(path)["config"] != config_to_tables(config):
        raise DataError(str(path), "was made with another config", "give another --out")
    return True


def train(precision: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run of the `train` command: its config, and [samples, accuracy] of its evaluations."""
    directory = args.out / "work" / _name(precision, seed)
    shutil.rmtree(directory, ignore_errors=True)
    chosen = options(precision, seed, args.max_steps)
    started = time.perf_counter()
    words = ["train", "--config", args.config, "--data", args.data, "--run-dir", directory]
    words += [word for option in chosen for word in ("--set", option)]
    with contextlib.redirect_stdout(io.StringIO()):
        status = run_command(list(map(str, words)))
    if status != TARGET_MISSED:
        raise DataError(str(directory), f"ended with status {status}", "see the line above")
    lines = (directory / "run_0" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    shutil.rmtree(directory)
    return {
        "schema_version": 1,
        "curve": [
            [each["samples"], each["mlm_accuracy"]]
            for each in records
            if each["mlm_accuracy"] is not None
        ],
        "skipped_steps": sum(each["skipped_steps"] for each in records),
        "seconds": round(time.perf_counter() - started, 1),
        "config": config_to_tables(load_config(args.config, chosen)),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(str(path), f"is not a run's file ({error})", "delete it") from None
    return result


def curves_of(results: Sequence[dict[str, Any]]) -> Curves:
    """Of the seeds that were run with every precision."""
    found: Curves = {precision: {} for precision in PRECISIONS}
    for result in results:
        config = result["config"]
        found[config["model"]["precision"]][config["run"]["seed"]] = dict(result["curve"])
    paired = set.intersection(*(set(of_seeds) for of_seeds in found.values()))
    return {
        precision: {seed: of_seeds[seed] for seed in sorted(paired)}
        for precision, of_seeds in found.items()
    }


def in_words(curves: Curves) -> str:
    """The table in Markdown: mean and standard deviation over seeds, and the seeds' differences."""
    seeds = list(curves["bf16"])
    evaluated = sorted(curves["bf16"][seeds[0]])
    every = max(1, len(evaluated) // COLUMNS)
    shown = evaluated[::-every][::-1]
    lines = [
        "| accuracy | " + " | ".join(f"{samples:,}" for samples in shown) + " samples |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for precision, of_seeds in curves.items():
        lines.append(_row(precision, [[of_seeds[seed][at] for seed in seeds] for at in shown]))
    differences = [
        [curves["fp8"][seed][at] - curves["bf16"][seed][at] for seed in seeds] for at in shown
    ]
    lines.append(_row("fp8 less bf16, seed by seed", differences))
    return "\n".join(lines)


def _row(name: str, columns: Sequence[Sequence[float]]) -> str:
    cells = [
        f"{statistics.fmean(each):.4f} ± {statistics.stdev(each) if len(each) > 1 else 0:.4f}"
        for each in columns
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


def draw(curves: Curves) -> bytes:
    """A PNG: a line for each run, a colour for each precision."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for number, (precision, of_seeds) in enumerate(curves.items()):
        for seed, curve in of_seeds.items():
            label = precision if seed == min(of_seeds) else None
            axes.plot(
                [samples / 1000 for samples in curve],
                list(curve.values()),
                color=f"C{number}",
                linestyle=("-", "--")[number % 2],
                linewidth=1,
                label=label,
            )
    axes.set_xlabel("thousand samples")
    axes.set_ylabel("masked-LM accuracy")
    axes.legend()
    axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    plt.close(figure)
    return picture.getvalue()


def tabulate(args: argparse.Namespace) -> None:
    """Table and picture of the seeds that are complete."""
    curves = curves_of([_read(path) for path in sorted((args.out / "runs").glob("*.json"))])
    if not curves["bf16"]:
        raise DataError(str(args.out / "runs"), "holds no complete seed", "start some with `run`")
    mpl.use("Agg")
    text = in_words(curves)
    write_file(args.out / "table.md", f"{text}\n".encode())
    write_file(args.out / "fp8.png", draw(curves))
    print(text)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="do the runs that are missing")
    table = commands.add_parser("table", help="table and picture of the finished runs")
    for each in (run, table):
        each.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the study")
    run.add_argument("--data", type=Path, required=True, metavar="DIR", help="with train/, eval/")
    run.add_argument(
        "--config", type=Path, default=CONFIG, metavar="FILE", help="default: cpu_tiny.toml"
    )
    run.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N")
    run.add_argument("--max-steps", type=int, default=MAX_STEPS, metavar="N", help="of a run")
    run.add_argument("--limit", type=int, metavar="N", help="stop after so many runs")
    return parser.parse_args()


def main() -> None:
    """Do what was asked for."""
    args = parse_arguments()
    try:
        campaign(args) if args.command == "run" else tabulate(args)
    except UserError as error:
        print(f"study_fp8: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
