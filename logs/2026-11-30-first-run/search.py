"""Trainings of the first run's candidates.

    python search.py DATA WORK TARGET ARM...
    python search.py table

An arm is NAME=SETTING,SETTING,... or NAME@SEED=..., on top of base.toml. Each training has
one rank with a batch of 32 on one core, and ends at the target. A line of records.jsonl holds its
settings, its evaluations and the samples at which the line between two evaluations crosses the
target. Arms that have a record are left out, so the same command continues an interrupted search.
"""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
RECORDS = HERE / "records.jsonl"
CONFIG, LONGEST, WORKERS = str(HERE / "base.toml"), 32_000, int(os.environ.get("WORKERS", 1))
EVALUATION = re.compile(r"evaluation at ([\d,]+) samples: accuracy ([\d.]+)")
LEFT_OUT = ("run.seed", "eval.target_accuracy", "data.max_predictions")
RATE = re.compile(r"([\d,]+) samples/s")
COMMON = {
    "run.max_steps": LONGEST // 32,
    "parallel.ranks_per_node": 1,
    "parallel.local_batch_size": 32,
    "eval.interval_samples": 2000,
    "checkpoint.interval_steps": "never",
}


def train(data, work, target, name, seed, settings):
    """Train one arm with one seed and return its record."""
    settings = COMMON | {"run.seed": seed, "eval.target_accuracy": target} | settings
    command = ["mlperf_bert", "train", "--config", CONFIG, "--data", data]
    command += ["--run-dir", str(Path(work) / f"{name}-{seed}-{time.time_ns()}")]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    output = ended.stdout + ended.stderr
    curve = [(int(n.replace(",", "")), float(a)) for n, a in EVALUATION.findall(output)]
    if not curve:
        sys.exit(f"{name}: {output[-2000:]}")
    rates = [int(rate.replace(",", "")) for rate in RATE.findall(output)]
    return {
        "name": name,
        "seed": seed,
        "settings": settings,
        "reached": crossing(curve, target),
        "samples_per_s": max(rates, default=0),
        "curve": curve,
    }


def crossing(curve, target):
    """Samples at which the line between two evaluations crosses the target; None for a miss."""
    before = (0, 0.0)
    for after in curve:
        if after[1] >= target:
            share = (target - before[1]) / (after[1] - before[1])
            return round(before[0] + share * (after[0] - before[0]))
        before = after
    return None


def table():
    """Print a row for each training."""
    print(
        "| what differs from `base.toml` | seed | samples to 0.297 | accuracy at 24,000 samples |"
    )
    print("|---|---|---|---|")
    for line in RECORDS.read_text().splitlines():
        record = json.loads(line)
        own = {
            key.partition(".")[2]: value
            for key, value in record["settings"].items()
            if (key not in COMMON and key not in LEFT_OUT) or key == "parallel.local_batch_size"
        }
        own = {key: value for key, value in own.items() if (key, value) != ("local_batch_size", 32)}
        at = {samples: accuracy for samples, accuracy in record["curve"]}
        reached = f"{record['reached']:,}" if record["reached"] else "missed"
        words = ", ".join(f"`{key}={value}`" for key, value in own.items())
        print(f"| {words} | {record['seed']} | {reached} | {at.get(24000, '')} |")


def main():
    """Train the arms that have no record yet."""
    if sys.argv[1:] == ["table"]:
        table()
        return
    data, work, target, *arms = sys.argv[1:]
    lines = RECORDS.read_text().splitlines() if RECORDS.exists() else []
    done = {(each["name"], each["seed"]) for each in map(json.loads, lines)}
    with ThreadPoolExecutor(WORKERS) as pool, RECORDS.open("a", encoding="utf-8") as file:
        waiting = []
        for arm in arms:
            name, _, pairs = arm.partition("=")
            name, _, seed = name.partition("@")
            settings = dict(pair.split("=", 1) for pair in pairs.split(",") if pair)
            if (name, int(seed or 1)) not in done:
                waiting.append(
                    pool.submit(train, data, work, float(target), name, int(seed or 1), settings)
                )
        for each in waiting:
            record = each.result()
            file.write(json.dumps(record) + "\n")
            file.flush()
            last = record["curve"][-1]
            print(record["name"], record["seed"], record["reached"], last, record["samples_per_s"])


if __name__ == "__main__":
    main()
