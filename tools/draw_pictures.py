"""Draw the pictures in docs/pictures/ from committed records.

    .venv/bin/python tools/draw_pictures.py [policies | small_batches | learning_curve | speed |
                                             step_parts | architecture]

Without a name, the script draws every picture.

- policy_<name>.png shows how a policy assigns 16 sequences of published lengths to two nodes with
  two ranks each. The functions that training uses make the assignment. Policies that produce the
  same batches share a picture.
- small_batches.png shows the imbalance of 1,024 ranks with 16 to 2 sequences each, from the records
  of `plan balance`.
- learning_curve.png shows the accuracy of the ten runs in results/cpu_2core_pytorch.
- speed.png compares our training step with the fastest padded baseline of `transformers`, and
  step_parts.png shows where the time of our step goes. Both are from the records of the log
  2026-11-30-cpu-step.
- architecture.png shows the folders of the submission in the order of its import contract.
"""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from bert_tools.common.length_histogram import wikipedia_lengths
from bert_tools.common.log_reader import read_log
from bert_tools.common.results import new_figure, png
from mlperf_bert.data.balance import Balance

REPOSITORY = Path(__file__).parents[1]
PICTURES = REPOSITORY / "docs" / "pictures"
RESULTS = REPOSITORY / "results" / "cpu_2core_pytorch" / "bert"
RESULTS_OUTPUT = REPOSITORY / "logs" / "2026-11-30-first-run" / "output.txt"
SPEED_RECORDS = REPOSITORY / "logs" / "2026-11-30-cpu-step"
MODELS = {"bert": "BERT", "modern": "ModernBERT"}
HIDDEN = {"2": 128, "4": 256, "12": 768}  # hidden size by number of layers
PARTS = {  # of a step: color
    "products": "#2f6db3",
    "attention": "#7db0e0",
    "loss": "#c0504d",
    "norms": "#9bbb59",
    "activations": "#d9a441",
    "embeddings": "#8064a2",
    "update": "#5a5a5a",
    "rest": "#bdbdbd",
}
SMALL_BATCHES = REPOSITORY / "logs" / "2026-11-29-small-batches"
WAYS = {  # sampler, policy and counts of a line: its label and style
    ("stratified_6_3_2_5", "presort_local", "equal"): ("presorted in nodes, as published", "s--"),
    ("stratified_6_3_2_5", "presort_global", "equal"): ("presorted over all ranks", "o-"),
    ("quantile", "presort_global", "unequal"): ("over all ranks, unequal counts", "^-"),
}
BLUE, GREY = "#2f6db3", "#8a8a8a"
DOTS_PER_INCH = 110
NODES, RANKS_PER_NODE, LOCAL_BATCH_SIZE = 2, 2, 4
RANKS = NODES * RANKS_PER_NODE
SEED = 11
MOST_TOKENS = 1600
NUMBER = {"ha": "center", "va": "center", "fontsize": 7}
WORK = {  # what the folders and files of the contract are for, in the architecture picture
    "tools/bert_tools": "all other commands, such as pretrain, score, plan and bench",
    "__main__": "the command line",
    "cli": "train, evaluate, verify, config, network-test",
    "train": "one run, from config to result",
    "prepare": "text to shards and index",
    "checkpoint": "write, read and resume",
    "evaluation": "held-out accuracy",
    "step": "one update, eager or captured",
    "run": "console, metrics, MLPerf log, run directory",
    "model": "BERT and ModernBERT, unpadded",
    "optim": "LAMB, AdamW, Muon",
    "data": "sampler, balance, loader, batch",
    "distributed": "ranks, clipping and all-reduce, signals",
    "config": "settings and their checks",
    "vocabulary": "word pieces",
    "compiled": "caches of compiled code",
    "files": "safe writing",
}
POLICIES = {
    "none": ("none", Balance()),
    "exchange_global_snake": ("exchange_global, snake", Balance(policy="exchange_global")),
    "local": (
        "exchange_local, presort_local (snake)",
        Balance(policy="presort_local", ranks_per_node=RANKS_PER_NODE),
    ),
    "presort_global": ("presort_global", Balance(policy="presort_global")),
    "presort_global_unequal": (
        "presort_global, unequal counts",
        Balance(policy="presort_global", counts="unequal"),
    ),
}


def policies() -> None:
    """Draw a picture of each distinct way in which policies assign sequences to ranks."""
    lengths = wikipedia_lengths().draw_evenly(RANKS * LOCAL_BATCH_SIZE, SEED)
    for name, (title, balance) in POLICIES.items():
        picture = draw_policy(lengths, title, balance)
        (PICTURES / f"policy_{name}.png").write_bytes(picture)


def draw_policy(lengths: np.ndarray, title: str, balance: Balance) -> bytes:
    """Draw how a policy assigns sequences to ranks, and return the picture as PNG.

    Each rank is a stacked bar of its sequences' `lengths`. A dashed line shows the mean of the
    bars.
    """
    assignment = balance(lengths.astype(np.float64).reshape(RANKS, 1, LOCAL_BATCH_SIZE))
    rank_lengths = np.split(lengths[assignment.indices], np.cumsum(assignment.counts)[:-1])
    loads = np.array([each.sum() for each in rank_lengths])
    figure = new_figure(4.2, 2.6)
    axes = figure.subplots()
    shade = mpl.colormaps["viridis_r"]
    for rank, parts in enumerate(rank_lengths):
        bottoms = np.cumsum(parts) - parts
        axes.bar(rank, parts, 0.7, bottoms, color=shade(parts / 512), edgecolor="white")
        for bottom, length in zip(bottoms, parts, strict=True):
            if length >= 60:  # high enough for its number
                color = "white" if length > 256 else "black"
                axes.text(rank, bottom + length / 2, str(length), color=color, **NUMBER)
    axes.axhline(loads.mean(), color="black", linestyle="--", linewidth=1)
    names = [f"rank {rank}\nnode {rank // RANKS_PER_NODE}" for rank in range(RANKS)]
    axes.set_xticks(range(RANKS), names, fontsize=8)
    axes.set_ylim(0, MOST_TOKENS)
    axes.set_ylabel("tokens", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_title(f"{title}: imbalance {loads.max() / loads.mean():.3f}", fontsize=9)
    return png(figure, DOTS_PER_INCH)


def small_batches() -> None:
    """Draw the imbalance over the number of sequences per rank."""
    files = [json.loads(path.read_text()) for path in SMALL_BATCHES.glob("balance_*.json")]
    figure = new_figure(6.4, 3.2)
    axes = figure.subplots()
    for way, (label, style) in WAYS.items():
        points = sorted(
            (file["global_batch_size"] // file["world_size"], row["imbalance_tokens"])
            for file in files
            for row in file["rows"]
            if (row["sampler"], row["policy"], row["counts_per_rank"]) == way
        )
        axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2, 4, 8, 16], ["2", "4", "8", "16"])
    axes.set_xlabel("sequences per rank", fontsize=9)
    axes.set_ylabel("largest load / mean load", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8)
    axes.set_title("Imbalance of 1,024 ranks with few sequences each", fontsize=10)
    (PICTURES / "small_batches.png").write_bytes(png(figure, DOTS_PER_INCH))


def learning_curve() -> None:
    """Draw the held-out accuracy over the samples trained, for every committed run."""
    figure = new_figure(6.4, 3.4)
    axes = figure.subplots()
    target = 0.0
    for path in sorted(RESULTS.glob("result_*.txt")):
        log = read_log(path, path.name)
        points = log.named("eval_accuracy")
        samples = [point.metadata["samples_count"] / 1000 for point in points]
        accuracies = [point.value for point in points]
        axes.plot(samples, accuracies, color=BLUE, alpha=0.55, linewidth=1.2)
        axes.plot(samples[-1], accuracies[-1], "o", color=BLUE, markersize=4)
        target = log.last_number("quality_target") or target
    found = re.search(r"context-free baseline: accuracy (0\.\d+)", RESULTS_OUTPUT.read_text())
    assert found
    baseline = float(found[1])
    for level, text, x, side in (
        (target, "target", 0.01, "left"),
        (baseline, "context-free baseline", 0.99, "right"),
    ):
        axes.axhline(level, color=GREY, linestyle="--", linewidth=1)
        place = {"transform": axes.get_yaxis_transform(), "ha": side}
        axes.text(x, level + 0.003, f"{text} {level:g}", fontsize=8, **place)
    axes.set_xlim(0)
    axes.set_ylim(0, 1.1 * target)
    axes.set_xlabel("samples trained, thousands", fontsize=9)
    axes.set_ylabel("held-out masked-token accuracy", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.set_title("Ten runs of cpu_tiny on two CPU cores, each with its own seed", fontsize=10)
    (PICTURES / "learning_curve.png").write_bytes(png(figure, DOTS_PER_INCH))


def speed() -> None:
    """Draw the speed of our training step, compared with that of `transformers`.

    Each bar is the ratio of our sequences per second to those of the fastest padded baseline, with
    its 95 % interval.
    """
    records = speed_records("against.jsonl")
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    for place, record in enumerate(reversed(records)):
        found = min(record["ratios"].values(), key=lambda each: each["times_as_fast"])
        ratio = found["times_as_fast"]
        errors = [[ratio - found["low"]], [found["high"] - ratio]]
        axes.barh(place, ratio, xerr=errors, color=BLUE if ratio >= 1 else GREY, capsize=2)
        axes.text(0.03, place, f"{ratio:.2f}", color="white", fontsize=8, va="center")
    axes.set_yticks(range(len(records)), [size_in_words(each) for each in reversed(records)])
    axes.axvline(1, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel("sequences per second, strongest padded transformers = 1", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.set_title("Training step on two CPU threads, layers x hidden size", fontsize=10)
    (PICTURES / "speed.png").write_bytes(png(figure, DOTS_PER_INCH))


def step_parts() -> None:
    """Draw which share of a step's time each part takes, and the bound of its products.

    The bound is the time that the step's matrix products and attention would take at the measured
    speed of the feed-forward layer's products.
    """
    records = speed_records("profile.jsonl")
    figure = new_figure(7.2, 4.2)
    axes = figure.subplots()
    for place, record in enumerate(reversed(records)):
        times = {
            part: sum(of_pass.get(part, 0) for of_pass in record["ms"].values()) for part in PARTS
        }
        start, total = 0.0, sum(times.values())
        for part, color in PARTS.items():
            share = times[part] / total
            axes.barh(place, share, left=start, color=color, label=part if place == 0 else None)
            start += share
        bound = 1e3 * sum(record["gflop"].values()) / record["peak_gflops"] / total
        axes.plot([bound, bound], [place - 0.4, place + 0.4], color="black", linewidth=2)
    axes.set_yticks(range(len(records)), [size_in_words(each) for each in reversed(records)])
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("share of the step's time (line: products and attention at peak)", fontsize=9)
    axes.tick_params(labelsize=8)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    axes.set_title("Where the time of our training step goes, two CPU threads", fontsize=10)
    (PICTURES / "step_parts.png").write_bytes(png(figure, DOTS_PER_INCH))


def speed_records(name: str) -> list[dict[str, Any]]:
    """Return the lines of a record of the training step's speed, sorted by model and size."""
    lines = (SPEED_RECORDS / name).read_text().splitlines()

    def order(record: dict[str, Any]) -> tuple[str, int, int]:
        model, layers, length = record["size"].split("-")
        return model, int(length), int(layers)

    return sorted(map(json.loads, lines), key=order)


def size_in_words(record: dict[str, Any]) -> str:
    """Return for example "BERT 2 x 128, 16 of up to 512 tokens"."""
    model, layers, length = record["size"].split("-")
    return (
        f"{MODELS[model]} {layers} x {HIDDEN[layers]}, {record['batch']} of up to {int(length):,}"
    )


def architecture() -> None:
    """Draw the layers of the import contract in pyproject.toml.

    A layer may import the layers below it.
    """
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (each["layers"] for each in contracts["contracts"] if each["type"] == "layers")
    figure = new_figure(6.4, 6.2)
    axes = figure.subplots()
    rows = [["tools/bert_tools"], *(layer.split(" | ") for layer in layers)]
    for number, names in enumerate(rows):
        width = 8 / len(names)
        for column, name in enumerate(names):
            left, bottom = column * width, -number
            color = "#f3efe2" if number == 0 else "#e8f0fb"
            box = mpl.patches.FancyBboxPatch(
                (left + 0.08, bottom + 0.14),
                width - 0.16,
                0.72,
                boxstyle="round,pad=0,rounding_size=0.1",
                facecolor=color,
                edgecolor=GREY,
            )
            axes.add_patch(box)
            words = f"{name}: {WORK[name]}" if name in WORK else name
            middle = left + width / 2, bottom + 0.5
            axes.text(*middle, words, ha="center", va="center", fontsize=8.5)
    axes.annotate("", (8.35, 1 - len(rows)), (8.35, 1), arrowprops={"arrowstyle": "->"})
    axes.text(8.5, 1 - len(rows) / 2, "may import", rotation=270, va="center", fontsize=9)
    axes.set_xlim(0, 8.8)
    axes.set_ylim(0.9 - len(rows), 1.1)
    axes.set_axis_off()
    (PICTURES / "architecture.png").write_bytes(png(figure, DOTS_PER_INCH))


DRAWINGS = (policies, small_batches, learning_curve, speed, step_parts, architecture)

if __name__ == "__main__":
    wanted = sys.argv[1:]
    for draw in DRAWINGS:
        if not wanted or draw.__name__ in wanted:
            draw()
