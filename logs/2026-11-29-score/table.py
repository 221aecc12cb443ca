"""Print the table of the measured scores: `python logs/2026-11-29-score/table.py`."""

import json
from pathlib import Path
from typing import Any

from bert_tools.common.results import markdown

SETS = ("family", "order", "same")
LONGER = "6,000 steps: "  # before the names of methods of the encoder that was trained longer


def with_interval(found: dict[str, Any]) -> str:
    """Format a mean and the half-width of its interval."""
    return f"{found['mean']:.3f} ± {found['half_width']:.3f}"


def main() -> None:
    """Print one row per method, with the accuracy on each set, and Spearman's correlation."""
    folder = Path(__file__).parent
    results = {name: json.loads((folder / name / "score.json").read_text()) for name in SETS}
    longer = {name: json.loads((folder / "longer" / f"{name}.json").read_text()) for name in SETS}
    rows: dict[str, dict[str, str]] = {}
    for measured, prefix in ((longer, LONGER), (results, "")):
        for name, result in measured.items():
            for each in result["labelled"]["means"]:
                if not prefix or each["method"].startswith("exported"):
                    row = rows.setdefault(prefix + each["method"], {})
                    row[name] = with_interval(each["accuracy"])
    (found,) = [e for e in longer["same"]["pairs"]["correlations"] if e["method"] == "exported"]
    rows[f"{LONGER}exported, frozen features"]["graded"] = (
        f"{found['spearman']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
    )
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
