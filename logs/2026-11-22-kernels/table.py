"""The table of README.md: every kernel before and after, as Triton 3.6 compiles it.

python logs/2026-11-22-kernels/table.py
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
SHOWN = ("registers", "spills", "programs", "occupancy", "byte_stores", "per_element")
RENAMED = {  # before: after
    ("FP8 norm", "_norm_fp8_forward"): ("FP8 norm", "_norm_forward"),
    ("FP8 norm", "_norm_fp8_backward"): ("FP8 norm", "_norm_backward"),
}


def rows_of(name: str) -> dict[tuple[str, str], dict]:
    """By part and kernel."""
    rows = json.loads((HERE / name).read_text(encoding="utf-8"))
    return {(row["case"], row["kernel"]): row for row in rows}


before = {RENAMED.get(key, key): row for key, row in rows_of("before-triton-3.6.json").items()}
head = ("part", "kernel", *(name.replace("_", " ") for name in SHOWN))
print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
for key, row in rows_of("triton-3.6.json").items():
    if key[1] != "_sum_rows" and "heads of" not in key[0]:
        old = before.get(key)
        cells = (
            f"{old[name]:.3g} -> {row[name]:.3g}" if old else f"{row[name]:.3g}" for name in SHOWN
        )
        print(f"| {key[0]} | `{key[1]}` | {' | '.join(cells)} |")
