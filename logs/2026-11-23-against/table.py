"""The Markdown tables of docs/how/speed.md, from the JSON that `run.sh` left at commit 616d0d8d.

python table.py [--ratios] [DIR ...]     default: this file's directory
"""

import json
import re
import sys
from pathlib import Path

MEASURED = re.compile(r"(\d+)x(\d+)(?:-(\d+))?")  # layers, hidden size, length
OTHERS = {  # the order of docs/how/speed.md
    "sorted": "masked positions, sorted by length",
    "sorted_compiled": "masked positions, sorted by length, torch.compile",
    "padded_to_longest": "masked positions, padded to the longest",
    "padded": "as people feed it: all positions, padded to the maximum",
}


def cell(result: dict, name: str) -> str:
    """`ratio (lowest to highest round), MFU`; bold where that is the strongest."""
    if result[f"ratio_{name}"] is None:
        return f"not measured: {result[f'{name}_reason'].split(':')[0]}"
    low, _, high = result[f"ratio_{name}_range"]
    ratio = f"{result[f'ratio_{name}']:.2f}"
    if name == result["strongest"]:
        ratio = f"**{ratio}**"
    return f"{ratio} ({low:.2f} to {high:.2f}), {result[f'{name}_mfu']:.2f}"


def results(here: Path) -> dict[str, dict]:
    """By column, the smallest model first: those that are here."""
    paths = {MEASURED.fullmatch(path.stem): path for path in here.glob("*.json")}
    by_size = {tuple(int(n or 0) for n in m.groups()): paths[m] for m in paths if m}
    found = {}
    for (layers, hidden, length), path in sorted(by_size.items()):
        result = json.loads(path.read_text())
        of_length = f" of {length:,}" if length else ""
        found[f"{layers} x {hidden}, {result['batch']}{of_length}"] = result
    return found


def table(here: Path) -> str:
    """The rows: ours and the machine, then each other contender; a column for each size."""
    found = results(here)
    rows = [
        ["layers x hidden, batch", *found],
        ["---"] * (1 + len(found)),
        ["matrix products, GFLOP/s", *(f"{1e3 * r['peak_tflops']:.0f}" for r in found.values())],
        [
            "ours: samples/s, MFU (by what it computes)",
            *(
                f"{r['ours_samples_per_s']:.2f}, {r['ours_mfu']:.2f} ({r['ours_done_mfu']:.2f})"
                for r in found.values()
            ),
        ],
    ]
    rows += [[text, *(cell(r, name) for r in found.values())] for name, text in OTHERS.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def ratios(places: list[Path]) -> str:
    """Our rate over that of the strongest padded way: a row for each model and longest text."""
    rows: dict[str, dict[str, str]] = {}
    for here in places:
        for size, result in results(here).items():
            name = {"modern": "ModernBERT"}.get(result.get("architecture", ""), "BERT")
            shape, _, rest = size.partition(",")
            longest = rest.partition(" of ")[2] or "512"
            low, _, high = result[f"ratio_{result['strongest']}_range"]
            cell = f"{result['ratio_strongest']:.2f} ({low:.2f} to {high:.2f})"
            rows.setdefault(f"{name}, up to {longest} tokens", {})[shape] = cell
    shapes = list(dict.fromkeys(shape for row in rows.values() for shape in row))
    lines = [["layers x hidden", *shapes], ["---"] * (1 + len(shapes))]
    lines += [[name, *(row[shape] for shape in shapes)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    words = sys.argv[1:]
    places = [Path(word) for word in words if word != "--ratios"] or [Path(__file__).parent]
    print(ratios(places) if "--ratios" in words else "\n".join(map(table, places)))
