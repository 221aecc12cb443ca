"""Losses of 300 steps and samples to target in three precisions: `precisions.sh` made the runs.

python logs/2026-11-29-todays-stack/precisions.py write RUNS    writes precisions.json
python logs/2026-11-29-todays-stack/precisions.py               prints two tables from it
"""

import json
import statistics
import sys
from pathlib import Path

RECORD = Path(__file__).with_name("precisions.json")
PRECISIONS = ("fp32", "bf16_autocast", "bf16")
SHOWN = (10, 50, 100, 200, 300)


def write(runs: Path) -> None:
    """Copy losses and outcomes of all runs in the directory `runs`."""
    record = {}
    for run in sorted(path for path in runs.iterdir() if path.is_dir()):
        lines = (run / "run_0" / "metrics.jsonl").read_text("utf-8").splitlines()
        records = [each for each in map(json.loads, lines) if each.get("loss") is not None]
        losses = {each["step"]: each["loss"] for each in records if each["step"] <= max(SHOWN)}
        outcome = json.loads((run / "run_0" / "outcome.json").read_text("utf-8"))
        kept = ("status", "samples", "mlm_accuracy", "seconds")
        record[run.name] = {"losses": losses, **{name: outcome[name] for name in kept}}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def tables() -> list[str]:
    """Return the lines of both Markdown tables."""
    record = json.loads(RECORD.read_text("utf-8"))
    seeds = sorted({name.rpartition("-")[2] for name in record})
    lines = [f"| precision | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |"]
    lines.append("|" + "---|" * (len(seeds) + 2))
    for precision in PRECISIONS:
        samples = [record[f"{precision}-{seed}"]["samples"] for seed in seeds]
        cells = [f"{each:,}" for each in (*samples, round(statistics.mean(samples)))]
        lines.append(f"| `{precision}` | {' | '.join(cells)} |")
    lines += ["", f"| loss at step | {' | '.join(map(str, SHOWN))} |"]
    lines.append("|" + "---|" * (len(SHOWN) + 1))
    for precision in PRECISIONS:
        cells = []
        for step in SHOWN:
            pairs = [
                (record[f"{precision}-{seed}"]["losses"], record[f"fp32-{seed}"]["losses"])
                for seed in seeds
            ]
            mean = statistics.mean(losses[str(step)] for losses, _ in pairs)
            apart = max(abs(losses[str(step)] - exact[str(step)]) for losses, exact in pairs)
            cells.append(f"{mean:.4f}" + (f" ({apart:.4f})" if precision != "fp32" else ""))
        lines.append(f"| `{precision}` | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(Path(sys.argv[2]))
    else:
        print("\n".join(tables()))
