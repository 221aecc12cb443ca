"""Tables of this log's README.md, docs/how/cluster_model.md and docs/how/scaling.md.

    python logs/2026-11-22-cluster-model/cluster_tables.py NAME      prints one, from tables.json

`errors` also has the exact binomial interval of each share, and the errors of two simpler models: a
lookup of the fitted class with the nearest sequences a rank, then accelerators; and a line through
the fitted classes' steps.
Every time to train is that of `bert_tools.plan.cluster.forecast`, which `plan cluster` prints.
"""

import csv
import json
import math
import sys
from pathlib import Path
from statistics import fmean

Table = list[list[str]]  # a header, then rows

TABLES = Path(__file__).with_name("tables.json")
STEPS = Path(__file__).with_name("published_steps.csv")
CLOSE = 0.15  # error that counts as a hit


def main(words: list[str]) -> None:
    """Print a table as Markdown."""
    tables: dict[str, Table] = json.loads(TABLES.read_text("utf-8"))
    if len(words) != 1 or words[0] not in tables:
        raise SystemExit(f"give one of {', '.join(tables)}")
    table = tables[words[0]]
    print(markdown(errors(table) if words == ["errors"] else table))


def errors(table: Table) -> Table:
    """The table with the time to train first, intervals, and the lookup beside the step."""
    from scipy.stats import binomtest

    head, fitted, step, other, whole = table
    looked_up = simple_row("step of the nearest fitted class", lookup_errors())
    line = simple_row("step by a line through the fitted classes", line_errors())
    rows = [[*head[:3], "share (95 %)", *head[3:]]]
    for row in (whole, step, looked_up, line, fitted, other):
        found = binomtest(*map(int, row[2].split(" of "))).proportion_ci()
        share = "" if row is fitted else f"{found.low:.0%} to {found.high:.0%}"
        rows.append([*row[:3], share, *row[3:]])
    return rows


def simple_row(name: str, errors: dict[str, float]) -> list[str]:
    """A row of held-out classes' errors."""
    misses = list(map(abs, errors.values()))
    hits = f"{sum(miss <= CLOSE for miss in misses)} of {len(misses)}"
    return ["held out", name, hits, f"{fmean(misses):.1%}", f"{max(misses):.1%}"]


def published_classes() -> list[dict[str, str]]:
    """The classes of published_steps.csv."""
    with STEPS.open(encoding="utf-8") as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def line_errors() -> dict[str, float]:
    """Error of a line through the fitted classes' steps, by held-out class.

    Its terms are a constant, a rank's sequences (a packed row of 512 has two), and with several
    nodes one over the network's bandwidth; by least squares of relative errors.
    """
    import numpy as np

    def terms(one: dict[str, str]) -> list[float]:
        # Programs named "captured" have packed rows, or padded ones that cost as much.
        sequences = int(one["local_batch"]) * (2 if "captured" in one["program"] else 1)
        return [1, sequences, 0 if one["nodes"] == "1" else 1 / float(one["network_gb_s"])]

    classes = published_classes()
    steps = {each["id"]: float(each["step_ms"]) for each in classes}
    fitted = [each for each in classes if each["role"] == "fitted"]
    weighted = np.array([[term / steps[each["id"]] for term in terms(each)] for each in fitted])
    line = np.linalg.lstsq(weighted, np.ones(len(fitted)), rcond=None)[0]
    held_out = [each for each in classes if each["role"] == "held_out"]
    return {each["id"]: float(terms(each) @ line) / steps[each["id"]] - 1 for each in held_out}


def lookup_errors() -> dict[str, float]:
    """Error of the nearest fitted class's step, by held-out class."""
    classes = published_classes()
    size = {
        each["id"]: [
            math.log(int(each["local_batch"])),
            math.log(int(each["nodes"]) * int(each["gpus_per_node"])),
        ]
        for each in classes
    }
    fitted = [each for each in classes if each["role"] == "fitted"]
    found = {}
    for one in classes:
        if one["role"] == "held_out":
            wanted = size[one["id"]]
            nearest = min(
                fitted,
                key=lambda each: [
                    abs(a - b) for a, b in zip(size[each["id"]], wanted, strict=True)
                ],
            )
            found[one["id"]] = float(nearest["step_ms"]) / float(one["step_ms"]) - 1
    return found


def markdown(table: Table) -> str:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
