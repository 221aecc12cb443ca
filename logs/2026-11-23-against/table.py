"""The Markdown tables of docs/how/speed.md, from the JSON that `run.sh` left at commit 616d0d8d.

python table.py [--sentence] [DIR ...]     default: this file's directory
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


def sentence(here: Path) -> str:
    """The headline, in words."""
    found = results(here)
    ways = sorted({f'"{OTHERS[result["strongest"]]}"' for result in found.values()})
    ratios = ", ".join(f"{each['ratio_strongest']:.2f}" for each in found.values())
    sizes = ", ".join(re.sub(r", \d+", "", size) for size in found)
    modern = {result.get("architecture", "bert") for result in found.values()} == {"modern"}
    model, of_length = ("ModernBERT", " of the longest length") if modern else ("BERT", "")
    return (
        f"Our {model} step does **{ratios}** times as many sequences per second as the strongest"
        f" padded way on a CPU ({' or '.join(ways)}), at {sizes}"
        f" (layers x hidden{of_length}, two threads)."
    )


if __name__ == "__main__":
    words = sys.argv[1:]
    make = sentence if "--sentence" in words else table
    where = [Path(word) for word in words if word != "--sentence"]
    print("\n".join(make(each) for each in where or [Path(__file__).parent]))
