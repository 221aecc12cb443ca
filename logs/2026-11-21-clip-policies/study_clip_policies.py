"""Samples to a masked-LM accuracy under each clip policy, on virtual ranks in one process.

    python study_clip_policies.py run --data DATA --out DIR
    python study_clip_policies.py table --out DIR

DATA holds the prepared sets: `mlperf_bert prepare --embedded --config
study_clip_policies.toml --out DATA`. `run` goes through policies x optimizers x global batches,
and for clipping by buckets through --bucket-caps, seed after seed, and writes one file
DIR/runs/<run>.json each when it is finished; started again, it goes on with what is missing.
`table` prints what was found as Markdown and writes DIR/table.md and DIR/clip_policies.png.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from scipy.special import stdtr

from bert_tools.common.results import mean_and_half_width, new_figure, png
from clip_study_runs import Cell, make_config, run_cell
from mlperf_bert.config.files import config_to_tables
from mlperf_bert.errors import DataError, UserError
from mlperf_bert.files import make_directory, remove_temporaries, write_file

POLICIES = ("none", "after_allreduce", "whole_before_allreduce", "bucket_before_allreduce")
COMPARED_WITH, BY_BUCKET = "after_allreduce", "bucket_before_allreduce"
# Learning rate and max_norm of (optimizer, global batch), the same for all policies; how they were
# found: README.md beside this file. Seed 0 was used for that alone.
SETTINGS = {
    ("adamw", 32): (2e-3, 1.5),
    ("adamw", 128): (2e-3, 0.8),
    ("lamb", 32): (5e-3, 1.5),
    ("lamb", 128): (1e-2, 0.8),
}
SECOND_CAMPAIGN = range(9, 25)  # seeds that decide what the first eight let one expect
SEEDS = (*range(1, 9), *SECOND_CAMPAIGN)
BUCKET_CAPS_MB = (0.125,)  # half a matrix of the feed-forward
MAX_SAMPLES = 65536


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """The runs asked for, seeds outermost, so that a campaign that is stopped has whole seeds."""
    pairs = [
        pair
        for pair in SETTINGS
        if pair[0] in args.optimizers and pair[1] in args.global_batch_sizes
    ]
    for seed, pair, policy in itertools.product(args.seeds, pairs, args.policies):
        tuned, max_norm = SETTINGS[pair]
        caps = args.bucket_caps if policy == BY_BUCKET else BUCKET_CAPS_MB
        for rate, cap in itertools.product(args.learning_rates or [tuned], caps):
            yield Cell(
                policy=policy,
                optimizer=pair[0],
                global_batch_size=pair[1],
                seed=seed,
                learning_rate=rate,
                max_norm=max_norm,
                bucket_cap_mb=cap,
                bucket_limit=args.bucket_limit if policy == BY_BUCKET else "by_size",
            )


def campaign(args: argparse.Namespace) -> None:
    """Run what is missing; a file that is there is a run that was finished."""
    wanted = list(cells(args))
    runs = args.out / "runs"
    make_directory(runs)
    remove_temporaries(runs, [f"{cell.name}.json" for cell in wanted])
    missing = [cell for cell in wanted if not _is_finished(cell, runs, args)]
    print(f"{len(missing)} of {len(wanted)} runs to do", flush=True)
    for cell in missing[: args.limit]:
        result = run_cell(cell, args.config, args.data, args.max_samples)
        write_file(runs / f"{cell.name}.json", json.dumps(result).encode())
        reached = result["samples_to_target"]
        words = f"{reached:,.0f} samples" if reached else f"best {result['best_accuracy']:.4f}"
        print(f"{cell.name}: {words} ({result['seconds']:.0f} s)", flush=True)


def _is_finished(cell: Cell, runs: Path, args: argparse.Namespace) -> bool:
    path = runs / f"{cell.name}.json"
    if not path.exists():
        return False
    config = make_config(args.config, cell, args.max_samples)
    if _read(path)["config"] != config_to_tables(config):
        raise DataError(str(path), "was made with another config", "give another --out")
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(str(path), f"is not a run's file ({error})", "delete it") from None
    return result


@dataclass(frozen=True, slots=True)
class Row:
    """The seeds of one policy with one optimizer and global batch."""

    optimizer: str
    global_batch_size: int
    policy: str
    num_buckets: int  # that were clipped each for itself; 0 for other policies
    bucket_limit: str
    samples: dict[int, float]  # to the target, by seed; infinite where it was not reached
    clipped: list[float]  # share of the updates, ranks or buckets that were over their limit

    @property
    def label(self) -> str:
        """The policy, with its number of buckets."""
        if not self.num_buckets:
            return self.policy
        limit = ", equal share" if self.bucket_limit == "equal_share" else ""
        return f"{self.policy}, {self.num_buckets} buckets{limit}"

    def log_ratios(self, other: "Row") -> dict[int, float]:
        """Logarithm of samples over those of `other` by seed, where both reached the target."""
        seeds = self.samples.keys() & other.samples.keys()
        both = {seed: (self.samples[seed], other.samples[seed]) for seed in sorted(seeds)}
        return {
            seed: math.log(mine / theirs)
            for seed, (mine, theirs) in both.items()
            if math.isfinite(mine + theirs)
        }


def rows(results: Sequence[dict[str, Any]]) -> list[Row]:
    """The finished runs by cell, policies innermost."""
    found: dict[tuple[str, int, str, int, str], Row] = {}
    for result in results:
        config = result["config"]
        parallel, policy = config["parallel"], config["clip"]["policy"]
        batch = parallel["ranks_per_node"] * parallel["local_batch_size"]
        num_buckets = len(result["bucket_sizes"]) if policy == BY_BUCKET else 0
        limit = config["clip"]["bucket_limit"]
        key = config["optim"]["name"], batch, policy, num_buckets, limit
        row = found.setdefault(key, Row(*key, {}, []))
        row.samples[config["run"]["seed"]] = result["samples_to_target"] or math.inf
        row.clipped.append(_clipped_fraction(result["curve"]))
    return sorted(
        found.values(),
        key=lambda row: (
            *(row.optimizer, row.global_batch_size, POLICIES.index(row.policy)),
            (row.num_buckets, row.bucket_limit),
        ),
    )


def _clipped_fraction(curve: Sequence[dict[str, Any]]) -> float:
    """Over the whole run; a point of the curve speaks for the updates since the one before."""
    weights = [
        after["samples"] - before for after, before in zip(curve, _starts(curve), strict=True)
    ]
    return statistics.fmean([point["clipped_fraction"] for point in curve], weights)


def _starts(curve: Sequence[dict[str, Any]]) -> list[int]:
    return [0, *(point["samples"] for point in curve[:-1])]


def in_words(table: Sequence[Row], compared_with: str = COMPARED_WITH) -> str:
    """The table in Markdown: means over the seeds; at its end each seed's over all of them."""
    lines = [
        "| optimizer | global batch | policy | seeds | samples to target "
        f"| over {compared_with}, same seed | p | clipped fraction |",
        "|---|---|---|---|---|---|---|---|",
    ]
    others = {
        (row.optimizer, row.global_batch_size): row for row in table if row.policy == compared_with
    }
    together: dict[str, dict[int, list[float]]] = {}
    for row in table:
        other = others.get((row.optimizer, row.global_batch_size), row)
        by_seed = {} if row is other else row.log_ratios(other)
        for seed, ratio in by_seed.items():
            together.setdefault(row.label, {}).setdefault(seed, []).append(ratio)
        ratios = list(by_seed.values())
        reached = [each / 1000 for each in row.samples.values() if math.isfinite(each)]
        lines.append(
            f"| {row.optimizer} | {row.global_batch_size} | {row.label} "
            f"| {len(reached)} of {len(row.samples)} | {_spread(reached)} | {_ratio(ratios)} "
            f"| {_chance(ratios)} | {statistics.fmean(row.clipped):.2f} |"
        )
    for label, of_seeds in together.items():
        ratios = [statistics.fmean(each) for each in of_seeds.values()]
        lines.append(
            f"| all | all | {label} | {len(ratios)} | | {_ratio(ratios)} | {_chance(ratios)} | |"
        )
    return "\n".join(lines)


def buckets_in_words(results: Sequence[dict[str, Any]]) -> str:
    """The size of each bucket, in the order of sending, and how often ranks had to clip it."""
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for result in results:
        parallel, numels = result["config"]["parallel"], result["bucket_sizes"]
        if result["config"]["clip"]["policy"] == BY_BUCKET:
            batch = parallel["ranks_per_node"] * parallel["local_batch_size"]
            is_equal = result["config"]["clip"]["bucket_limit"] == "equal_share"
            buckets = f"{len(numels)}{', equal share' if is_equal else ''}"
            key = result["config"]["optim"]["name"], buckets, batch
            found.setdefault(key, []).append(result)
    lines = [
        "| optimizer | buckets | global batch | thousand elements | clipped share of each |",
        "|---|---|---|---|---|",
    ]
    by_number = sorted(found.items(), key=lambda each: (len(each[1][0]["bucket_sizes"]), each[0]))
    for (optimizer, count, batch), runs in by_number:
        numels = ", ".join(f"{numel / 1000:.3g}" for numel in runs[0]["bucket_sizes"])
        points = [point["clipped_by_bucket"] for run in runs for point in run["curve"]]
        shares = ", ".join(f"{statistics.fmean(each):.2f}" for each in zip(*points, strict=True))
        lines.append(f"| {optimizer} | {count} | {batch} | {numels} | {shares} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    """Mean, least and most of values that may be none, in thousands."""
    if not values:
        return "not reached"
    return f"{statistics.fmean(values):.1f} K ({min(values):.1f} K to {max(values):.1f} K)"


def _ratio(logs: Sequence[float]) -> str:
    """Geometric mean of ratios and its 95 % interval, of their logarithms."""
    if not logs:
        return "-"
    mean, half = mean_and_half_width(logs)
    if half is None:
        return f"{math.exp(mean):.3f}"
    return f"{math.exp(mean):.3f} ({math.exp(mean - half):.3f} to {math.exp(mean + half):.3f})"


def _chance(logs: Sequence[float]) -> str:
    """The chance of a mean as far from 0, were there no difference: two-sided, by Student's t."""
    if len(logs) < 2:
        return "-"
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    if not error:
        return "-"
    chance = 2 * stdtr(len(logs) - 1, -abs(statistics.fmean(logs)) / error)
    return f"{chance:.3f}" if chance >= 1e-3 else "< 0.001"


def draw(table: Sequence[Row]) -> bytes:
    """A PNG: a panel for each optimizer and batch, a point for each seed, a bar at the mean.

    A run that did not reach the target has no point.
    """
    pairs = sorted({(row.optimizer, row.global_batch_size) for row in table})
    figure = new_figure(3.6 * len(pairs), 3.6)
    panels = figure.subplots(1, len(pairs), squeeze=False)
    for axes, pair in zip(panels[0], pairs, strict=True):
        shown = [row for row in table if (row.optimizer, row.global_batch_size) == pair]
        for place, row in enumerate(shown):
            _draw_row(axes, place, row)
        labels = [row.label.replace("_", " ").replace(", ", "\n") for row in shown]
        axes.set_yticks(range(len(shown)), labels, fontsize=7)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
        axes.set_title(f"{pair[0]}, global batch {pair[1]}", fontsize=9)
        axes.set_xlabel("thousand samples to the target", fontsize=8)
        axes.grid(alpha=0.3, axis="x")
    return png(figure, 110)


def _draw_row(axes: Axes, place: int, row: Row) -> None:
    thousands = {seed: each / 1000 for seed, each in row.samples.items() if math.isfinite(each)}
    for number, seed in enumerate(sorted(thousands)):
        aside = 0.6 * ((number + 0.5) / len(thousands) - 0.5)  # so that equal ones are all seen
        axes.plot(thousands[seed], place + aside, "o", color=f"C{seed % 10}", markersize=4)
    if thousands:
        axes.plot(statistics.fmean(thousands.values()), place, "k|", markersize=24)


def tabulate(args: argparse.Namespace) -> None:
    """Table and picture of the runs that are there."""
    results = [_read(path) for path in sorted((args.out / "runs").glob("*.json"))]
    table = rows(results)
    if not table:
        raise DataError(str(args.out / "runs"), "holds no finished run", "start some with `run`")
    fresh = rows([each for each in results if each["config"]["run"]["seed"] in SECOND_CAMPAIGN])
    tables = [in_words(table), buckets_in_words(results), in_words(fresh)]
    if any(row.policy == "none" for row in table):
        tables.append(in_words(table, "none"))
    text = "\n\n".join(tables)
    write_file(args.out / "table.md", f"{text}\n".encode())
    write_file(args.out / "clip_policies.png", draw(table))
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
        "--config",
        type=Path,
        default=Path(__file__).with_suffix(".toml"),
        metavar="FILE",
        help="what all runs share (default: the study's)",
    )
    optimizers = sorted({optimizer for optimizer, _ in SETTINGS})
    batches = sorted({batch for _, batch in SETTINGS})
    run.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    run.add_argument("--optimizers", nargs="+", choices=optimizers, default=optimizers)
    run.add_argument("--global-batch-sizes", nargs="+", type=int, choices=batches, default=batches)
    run.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N")
    run.add_argument("--learning-rates", nargs="+", type=float, metavar="R", help="try these")
    run.add_argument("--bucket-caps", nargs="+", type=float, default=BUCKET_CAPS_MB, metavar="MB")
    run.add_argument("--bucket-limit", choices=("by_size", "equal_share"), default="by_size")
    run.add_argument("--max-samples", type=int, default=MAX_SAMPLES, metavar="N", help="of a run")
    run.add_argument("--limit", type=int, metavar="N", help="stop after so many runs")
    return parser.parse_args()


def main() -> None:
    """Do what was asked for, on one thread, so that other threads change no sum."""
    args = parse_arguments()
    torch.set_num_threads(1)
    try:
        campaign(args) if args.command == "run" else tabulate(args)
    except UserError as error:
        print(f"study_clip_policies: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
