"""Tables of the whole runs, from `records.jsonl`.

python logs/2026-11-27-questions/table.py quality     answers, and samples to a share of right ones
python logs/2026-11-27-questions/table.py seconds     the same share in seconds
python logs/2026-11-27-questions/table.py rounding    how far runs of one seed lie apart

Engines whose runs have the same scores in every evaluation of every seed are one row of `quality`:
they computed the same numbers, so they are one measurement. Percentages have Student's t intervals,
samples and seconds those of logarithms; engines are compared with `single` seed by seed.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from scipy.stats import ttest_1samp

RECORDS = Path(__file__).with_name("records.jsonl")
BATCH = 32
TARGET = 50.0  # per cent of the questions
FIRST = "single"
PARTS = ("answerable", "unanswerable")


def main(name):
    """Print a table as Markdown."""
    rows = {"quality": quality, "seconds": seconds, "rounding": rounding}[name](runs_by_engine())
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    print("\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]))


def runs_by_engine():
    """The whole runs of each engine, by seed."""
    found = {}
    for run in map(json.loads, RECORDS.read_text("utf-8").splitlines()):
        if run["part"] == "whole" and run["global_batch"] == BATCH:
            found.setdefault(run["label"], []).append(run)
    return {name: sorted(runs, key=lambda run: run["seed"]) for name, runs in found.items()}


def distinct(engines):
    """The same with names of engines that had the same scores joined."""
    names = {}
    for name, runs in engines.items():
        names.setdefault(json.dumps([scores(run) for run in runs]), []).append(name)
    return {", ".join(f"`{each}`" for each in same): engines[same[0]] for same in names.values()}


def scores(run):
    """Updates and exact match of all evaluations."""
    return [[each["update"], each["exact_match"]] for each in run["on_the_way"]] + [
        [run["updates"], run["exact_match"]]
    ]


def samples_to(run):
    """Samples until the line between two evaluations first reaches the target."""
    for (before, low), (after, high) in pairwise(scores(run)):
        if high >= TARGET:
            return BATCH * (before + (TARGET - low) / (high - low) * (after - before))
    raise ValueError(run["name"])


def plain(values):
    """Mean and half of its 95 % interval."""
    low, high = ttest_1samp(values, 0).confidence_interval()
    return f"{np.mean(values):.1f} ± {(high - low) / 2:.1f}"


def geometric(values, form):
    """Geometric mean with its 95 % interval."""
    logs = np.log(values)
    low, high = np.exp(ttest_1samp(logs, 0).confidence_interval())
    return f"{np.exp(logs.mean()):{form}} ({low:{form}} to {high:{form}})"


def quality(engines):
    """Answers of the last models, the difference to one rank, and samples to the target."""
    head = ["engine", "exact match, %", "answerable", "unanswerable", "F1, %"]
    head += ["exact match less `single`'s, same seed", f"samples to {TARGET:.0f} %"]
    rows = [[*head, "over `single`'s, same seed"]]
    single = engines[FIRST]
    for name, runs in distinct(engines).items():
        row = [name, plain([run["exact_match"] for run in runs])]
        row += [plain([run[part]["exact_match"] for run in runs]) for part in PARTS]
        row += [plain([run["f1"] for run in runs])]
        samples = np.array([samples_to(run) for run in runs])
        more, times = "-", "-"
        if runs != single:
            pairs = list(zip(runs, single, strict=True))
            more = plain([run["exact_match"] - one["exact_match"] for run, one in pairs])
            times = geometric(samples / [samples_to(one) for one in single], ".3f")
        rows.append([*row, more, geometric(samples, ",.0f"), times])
    return rows


def seconds(engines):
    """Seconds of training alone to the target, at the pace of each run's plain updates."""
    rows = [["engine", f"seconds to {TARGET:.0f} %", "over `single`'s, same seed"]]
    taken = {
        name: np.array([samples_to(run) / run["samples_per_s"] for run in runs])
        for name, runs in engines.items()
    }
    for name, each in taken.items():
        ratio = "-" if name == FIRST else geometric(each / taken[FIRST], ".2f")
        rows.append([f"`{name}`", geometric(each, ".1f"), ratio])
    return rows


def rounding(engines):
    """Samples to the target of engines that differ in the order of sums alone, by seed."""
    rows = [["seed", "exact match, %", f"samples to {TARGET:.0f} %", "most over least"]]
    for runs in zip(*distinct(engines).values(), strict=True):
        matches = [run["exact_match"] for run in runs]
        samples = [samples_to(run) for run in runs]
        row = [str(runs[0]["seed"]), f"{min(matches):.1f} to {max(matches):.1f}"]
        row += [f"{min(samples):,.0f} to {max(samples):,.0f}"]
        rows.append([*row, f"{max(samples) / min(samples):.3f}"])
    return rows


if __name__ == "__main__":
    main(sys.argv[1])
