"""Print the table of the measured scores: `python logs/2026-11-29-score/table.py`."""

import json
from pathlib import Path
from typing import Any

from bert_tools.common.results import markdown

SETS = ("family", "order", "same")


def with_interval(found: dict[str, Any]) -> str:
    """Format a mean and the half-width of its interval."""
    return f"{found['mean']:.3f} ± {found['half_width']:.3f}"


def main() -> None:
    """Print one row per method, with the accuracy on each set, and Spearman's correlation."""
    folder = Path(__file__).parent
    results = {name: json.loads((folder / name / "score.json").read_text()) for name in SETS}
    rows: dict[str, dict[str, str]] = {}
    for name, result in results.items():
        for each in result["labelled"]["means"]:
            rows.setdefault(each["method"], {})[name] = with_interval(each["accuracy"])
    for each in results["same"]["pairs"]["correlations"]:
        row = {"tf-idf cosine": "bag of words"}.get(each["method"])
        bounds = f"{each['low']:.2f} to {each['high']:.2f}"
        rows[row or f"{each['method']}, frozen features"]["graded"] = (
            f"{each['spearman']:.2f} ({bounds})"
        )
    head = ["", *SETS, "graded"]
    cells = [[name, *(row.get(key, "-") for key in head[1:])] for name, row in rows.items()]
    print(*markdown(head, cells), sep="\n")


if __name__ == "__main__":
    main()
