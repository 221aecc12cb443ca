"""How many times as fast each technique is, from `records.jsonl`.

python logs/2026-11-27-small-cluster/gains.py

The ratio of tokens a second to those of "nothing", round by round: geometric mean of six rounds
with its 95 % interval by Student's t of logarithms.
"""

import json
from pathlib import Path

import numpy as np
from scipy.stats import ttest_1samp

RECORDS = Path(__file__).with_name("records.jsonl")
BASE = "nothing"


def main():
    """Print the table as Markdown: a row for each technique, a column for each group."""
    records = map(json.loads, RECORDS.read_text("utf-8").splitlines())
    groups = [each for each in records if not each["name"].startswith("buckets")]
    arms = dict.fromkeys(arm for each in groups for arm in each["blocks"] if arm != BASE)
    titles = [each["name"].removeprefix("techniques, ") for each in groups]
    print(f"| ranks, network | {' | '.join(titles)} |\n|{'---|' * (len(titles) + 1)}")
    for arm in arms:
        print(f"| {arm} | {' | '.join(gain(each['blocks'], arm) for each in groups)} |")


def gain(blocks, arm):
    """The cell of a technique in a group, which may lack it."""
    if arm not in blocks:
        return ""
    logs = np.log(rates(blocks[arm]) / rates(blocks[BASE]))
    low, high = np.exp(ttest_1samp(logs, 0).confidence_interval())
    return f"{np.exp(logs.mean()):.2f} ({low:.2f} to {high:.2f})"


def rates(block):
    """Tokens a ms of each round."""
    return np.sum(block["tokens"], axis=(1, 2)) / np.sum(block["step_ms"], axis=1)


if __name__ == "__main__":
    main()
