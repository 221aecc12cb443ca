"""The table of this page, from `accuracy.jsonl`: accuracies of the five fresh seeds.

python logs/2026-11-25-modern/table.py

Intervals are Student's t; that of the ratio is of logarithms, seed by seed.
"""

import json
from pathlib import Path

import numpy as np
from scipy.stats import ttest_1samp

RECORDS = Path(__file__).with_name("accuracy.jsonl")
TRIAL_SEED = 7  # of the search for settings
NAMES = ("BERT", "ModernBERT")


def main():
    """Print the table as Markdown."""
    records = map(json.loads, RECORDS.read_text("utf-8").splitlines())
    fresh = sorted((r for r in records if r["seed"] != TRIAL_SEED), key=lambda each: each["seed"])
    found = {}
    print(
        "| architecture | tuned: rate, spread | accuracy, mean of 5 seeds (95 %) | median |", end=""
    )
    print(" microseconds a token |\n|---|---|---|---|---|")
    for name in NAMES:
        own = [each for each in fresh if each["name"] == name]
        found[name] = np.array([each["accuracy"] for each in own])
        rate, _, spread = (each.split("=")[1] for each in own[0]["settings"])
        low, high = ttest_1samp(found[name], 0).confidence_interval()
        middle = np.median([1e6 / each["tokens_per_s"] for each in own])
        mean = f"{found[name].mean():.4f} ({low:.4f} to {high:.4f})"
        print(
            f"| {name} | {rate}, {spread} | {mean} | {np.median(found[name]):.4f} | {middle:.1f} |"
        )
    logs = np.log(found["ModernBERT"] / found["BERT"])
    low, high = np.exp(ttest_1samp(logs, 0).confidence_interval())
    ratio = f"{np.exp(logs.mean()):.2f} ({low:.2f} to {high:.2f})"
    medians = np.median(found["ModernBERT"]) / np.median(found["BERT"])
    print(f"| ratio, seed by seed | | {ratio} | {medians:.2f} | |")


if __name__ == "__main__":
    main()
