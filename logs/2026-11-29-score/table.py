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
    rows: dict[str, list[str]] = {}
    for result in results.values():
        for each in result["labelled"]["means"]:
            rows.setdefault(each["method"], []).append(with_interval(each["accuracy"]))
    for method, cells in rows.items():
        cells.append("-")
        for each in results["same"]["pairs"]["correlations"]:
            is_frozen = method == f"{each['method']}, frozen features"
            if is_frozen or (method, each["method"]) == ("bag of words", "tf-idf cosine"):
                bounds = f"{each['low']:.2f} to {each['high']:.2f}"
                cells[-1] = f"{each['spearman']:.2f} ({bounds})"
    print(*markdown(["", *SETS, "graded"], [[k, *v] for k, v in rows.items()]), sep="\n")


if __name__ == "__main__":
    main()
