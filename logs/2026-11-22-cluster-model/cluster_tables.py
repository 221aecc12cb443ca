"""Tables of this log's README.md, docs/how/cluster_model.md and docs/how/scaling.md.

    python logs/2026-11-22-cluster-model/cluster_tables.py NAME      prints one, from tables.json

Every time to train is that of `bert_tools.plan.cluster.forecast`, which `plan cluster` prints.
"""

import json
import sys
from pathlib import Path

Table = list[list[str]]  # a header, then rows

TABLES = Path(__file__).with_name("tables.json")


def main(words: list[str]) -> None:
    """Print a table as Markdown."""
    tables: dict[str, Table] = json.loads(TABLES.read_text("utf-8"))
    if len(words) != 1 or words[0] not in tables:
        raise SystemExit(f"give one of {', '.join(tables)}")
    print(markdown(tables[words[0]]))


def markdown(table: Table) -> str:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
