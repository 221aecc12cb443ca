"""The tables of the law in the README here, from the JSON files beside this script.

python logs/2026-11-22-scaling-law/law_tables.py fits | note
"""

import json
import sys
from pathlib import Path
from typing import Any

FITS = {  # the file, and what its entries are called
    "a100_v0.7": "NVIDIA, A100, v0.7 (those with logs)",
    "a100_v1.1": "NVIDIA, A100, v1.1",
    "a100_v2.0": "NVIDIA, A100, v2.0",
    "a100_v2.1": "NVIDIA, A100, v2.1",
    "h100_v3.0_v3.1": "NVIDIA and CoreWeave, H100, v3.0 and v3.1",
    "a100_all_closed": "all closed entries on A100, v0.7 to v4.1",
}
MOST_LISTED = 4  # sizes; of more the ends
NOTE = (228.3, -0.7392)  # Cerebras' coefficient in minutes and exponent
IN_TABLE = {2048: 0.81}  # MLCommons' table has it, and no logs are public


def main(name: str) -> None:
    """Print a table as Markdown."""
    rows = {"fits": fits, "note": note}[name]()
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    print("\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]))


def fits() -> list[list[str]]:
    """Each fit with its intervals, and the exponents that it is made of."""
    rows = [["entries", "time, minutes", "95 % of the exponent"]]
    rows[0] += ["throughput", "samples"]
    for name, words in FITS.items():
        fit = read(name)
        sizes = sorted({entry["accelerators"] for entry in fit["entries"]})
        listed = f"{sizes[0]:,} to {sizes[-1]:,}"
        if len(sizes) <= MOST_LISTED:
            listed = ", ".join(f"{size:,}" for size in sizes)
        exponent = fit["exponent"]
        rows.append(
            [
                f"{words}: {listed}",
                f"{fit['coefficient_minutes']:.1f} * p^{exponent:.3f}",
                f"{fit['exponent_low']:.2f} to {fit['exponent_high']:.2f}",
                f"p^{fit['throughput_exponent']:.3f}",
                f"p^{fit['samples_exponent']:.3f}",
            ]
        )
    return rows


def note() -> list[list[str]]:
    """Cerebras' law beside the entries that it can have been fitted to."""
    fit = read("a100_v0.7")
    mine = (fit["coefficient_minutes"], fit["exponent"])
    rows = [["p", "time by its logs, minutes"]]
    rows[0] += [f"{a:.1f} * p^{b:.{digits}f}" for (a, b), digits in ((NOTE, 4), (mine, 3))]
    rows[0][-1] += " (the three)"
    times = {each["accelerators"]: f"{each['time_min']:.2f}" for each in fit["entries"]}
    told = {p: f"no logs; {minutes} in MLCommons' table" for p, minutes in IN_TABLE.items()}
    for p, time in sorted((times | told).items()):
        rows.append([f"{p:,}", time, *(f"{a * p**b:.3g}" for a, b in (NOTE, mine))])
    return rows


def read(name: str) -> dict[str, Any]:
    """What `plan law --json` printed."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name(f"{name}.json").read_text("utf-8"))
    return found


if __name__ == "__main__":
    main(sys.argv[1])
