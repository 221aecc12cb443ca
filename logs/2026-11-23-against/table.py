"""The Markdown table of docs/how/speed.md, from the JSON objects that `run.sh` left here."""

import json
import sys
from pathlib import Path

SIZES = ("2x128", "4x256", "12x768")
OTHERS = {  # the order of docs/how/speed.md
    "sorted": "masked positions, sorted by length",
    "sorted_compiled": "masked positions, sorted by length, torch.compile",
    "padded_to_longest": "masked positions, padded to the longest",
    "padded": "as people feed it: all positions, padded to 512",
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
    """By size, those that are here."""
    paths = {size: here / f"{size}.json" for size in SIZES}
    return {size: json.loads(path.read_text()) for size, path in paths.items() if path.exists()}


def table(here: Path) -> str:
    """The rows: ours and the machine, then each other contender; a column for each size."""
    found = results(here)
    rows = [
        [
            "layers x hidden, batch",
            *(f"{s.replace('x', ' x ')}, {r['batch']}" for s, r in found.items()),
        ],
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
    sizes = ", ".join(size.replace("x", " x ") for size in found)
    return (
        f"Against the strongest of the padded ways on a CPU ({' or '.join(ways)})\n"
        f"ours does **{ratios}** times as many sequences a second, at {sizes}"
        " (layers x hidden, two threads)."
    )


if __name__ == "__main__":
    make = sentence if sys.argv[1:] == ["--sentence"] else table
    print(make(Path(__file__).parent))
