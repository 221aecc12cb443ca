"""Accuracy of ModernBERT's architecture beside BERT's: equal weights, tokens and tuning, 5 seeds.

    python accuracy.py DATA WORK      one core a training; those in `accuracy.jsonl` are not redone
    python accuracy.py --table        Markdown of `accuracy.jsonl`

DATA is `mlperf_bert prepare --embedded --config encoder_cpu_tiny --out DATA`. Each architecture is
trained by its config with every rate of RATES and spread of SPREADS, and one seed; then with fresh
seeds at the settings whose last accuracy was best.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np

from bert_tools.report.run_files import read_metrics
from bert_tools.tune.objective import read_curve
from mlperf_bert.config.files import load_config
from mlperf_bert.config.options import find_config

RECORDS = Path(__file__).with_name("accuracy.jsonl")
CONFIGS = {"BERT": "encoder_cpu_tiny", "ModernBERT": "modern_tiny_cpu"}
RATES, SPREADS = (1e-3, 2e-3, 4e-3), (0.035, 0.07)
TRIAL_SEED, SEEDS = 7, (201, 202, 203, 204, 205)
STEPS, DRAWS = 2250, 10_000
SAME = (  # for both
    *("parallel.ranks_per_node=1", "parallel.local_batch_size=32", "eval.target_accuracy=none"),
    *(f"run.max_steps={STEPS}", f"schedule.decay_steps={STEPS}", "eval.interval_samples=12000"),
)


def settings_of(rate, spread):
    """One setting; the rate falls to 0.35 of its highest, as in the configs."""
    return (
        f"optim.learning_rate={rate}",
        f"schedule.end_learning_rate={0.35 * rate:.4g}",
        f"model.initializer_range={spread}",
    )


def trained(data, work, name, settings, seed):
    """The record of one training; made unless it is there."""
    for record in read_records():
        if (record["name"], record["seed"], tuple(record["settings"])) == (name, seed, settings):
            return record
    directory = work / "-".join([name, str(seed), *(each.split("=")[1] for each in settings)])
    command = [sys.executable, "-m", "mlperf_bert", "train", "--config", CONFIGS[name]]
    command += ["--data", data, "--run-dir", directory, "--resume", "auto"]
    words = (f"run.seed={seed}", *SAME, *settings)
    command += [word for each in words for word in ("--set", each)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    start = time.monotonic()
    with open(f"{directory}.log", "a") as log:
        status = subprocess.run(list(map(str, command)), stdout=log, stderr=log, env=environ)
    if status.returncode:
        sys.exit(f"accuracy.py: error: {name} did not end in order, see {directory}.log")
    curve = read_curve(directory / "run_0")
    rates = [each["tokens_per_s"] for each in read_metrics(directory / "run_0" / "metrics.jsonl")]
    record = {
        **{"name": name, "seed": seed, "settings": settings, "curve": curve},
        "accuracy": curve[-1][1],
        "tokens_per_s": float(np.median(rates)),
        "seconds": round(time.monotonic() - start, 1),
    }
    with open(RECORDS, "a") as file:
        print(json.dumps(record), file=file)
    print(f"{name}, seed {seed}, {' '.join(settings)}: {record['accuracy']:.4f}", flush=True)
    return record


def read_records():
    """All records so far."""
    return list(map(json.loads, RECORDS.read_text().splitlines())) if RECORDS.exists() else []


def table():
    """Accuracy of the fresh seeds, with the middle 95 % of means of drawn seeds."""
    records, found = read_records(), {}
    mean = "accuracy, mean of 5 seeds (95 %)"
    yield f"| architecture | weights | tuned: rate, spread | {mean} | microseconds a token |"
    yield "|---|---|---|---|---|"
    draws = np.random.default_rng(1).integers(0, len(SEEDS), (DRAWS, len(SEEDS)))
    for name, config in CONFIGS.items():
        own = sorted((r for r in records if r["name"] == name), key=lambda each: each["seed"])
        own = [each for each in own if each["seed"] in SEEDS]
        found[name] = np.array([each["accuracy"] for each in own])
        low, high = np.quantile(found[name][draws].mean(axis=1), [0.025, 0.975])
        rate, _, spread = (each.split("=")[1] for each in own[0]["settings"])
        weights = load_config(find_config(config)).model.num_parameters
        seconds = np.median([1e6 / each["tokens_per_s"] for each in own])
        mean = f"{found[name].mean():.4f} ({low:.4f} to {high:.4f})"
        yield f"| {name} | {weights:,} | {rate}, {spread} | {mean} | {seconds:.1f} |"
    apart = found["ModernBERT"] - found["BERT"]
    low, high = np.quantile(apart[draws].mean(axis=1), [0.025, 0.975])
    yield f"| difference, by seed | | | {apart.mean():+.4f} ({low:+.4f} to {high:+.4f}) | |"


def main(data, work):
    """Train all of them, two at a time."""
    work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        settings = [settings_of(*each) for each in product(RATES, SPREADS)]
        asked = [(name, each, TRIAL_SEED) for each in settings for name in CONFIGS]
        trials = list(pool.map(lambda one: trained(data, work, *one), asked))
        best = {
            name: max((t for t in trials if t["name"] == name), key=lambda t: t["accuracy"])
            for name in CONFIGS
        }
        seeds = [(name, tuple(best[name]["settings"]), seed) for seed in SEEDS for name in CONFIGS]
        list(pool.map(lambda one: trained(data, work, *one), seeds))


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        print("\n".join(table()))
    else:
        main(*map(Path, sys.argv[1:]))
