"""Tables of this log's README.md, docs/how/cluster_model.md and docs/how/scaling.md.

    python logs/2026-11-22-cluster-model/cluster_tables.py NAME      prints one, from tables.json

`errors` also has the exact binomial interval of each share, and the errors of a lookup among the
published steps: that of the fitted class with the nearest sequences a rank, then accelerators.
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
    misses = [abs(miss) for miss in lookup_errors().values()]
    hits = f"{sum(miss <= CLOSE for miss in misses)} of {len(misses)}"
    looked_up = ["held out", "step of the nearest fitted class", hits]
    looked_up += [f"{fmean(misses):.1%}", f"{max(misses):.1%}"]
    rows = [[*head[:3], "share (95 %)", *head[3:]]]
    for row in (whole, step, looked_up, fitted, other):
        found = binomtest(*map(int, row[2].split(" of "))).proportion_ci()
        share = "" if row is fitted else f"{found.low:.0%} to {found.high:.0%}"
        rows.append([*row[:3], share, *row[3:]])
    return rows


def lookup_errors() -> dict[str, float]:
    """Error of the nearest fitted class's step, by held-out class."""
    with STEPS.open(encoding="utf-8") as lines:
        classes = list(csv.DictReader(line for line in lines if not line.startswith("#")))
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
