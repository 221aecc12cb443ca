"""Forecasts of `plan cluster` next to published times to train, from A100 to GB200.

    python logs/2026-11-29-todays-stack/forecasts.py write    simulates, and writes forecasts.json
    python logs/2026-11-29-todays-stack/forecasts.py          prints the table of forecasts.json

The same number of accelerators and the same global batch are simulated as in the published entries.
The programs, their tuning and the samples that they needed differ.
"""

import json
import statistics
import sys
from pathlib import Path

RECORD = Path(__file__).with_name("forecasts.json")
COLUMNS = ("accelerators", "global batch", "precision", "forecast min", "published min", "ratio")
CASES = (  # accelerator, config, nodes, ranks of a node, sequences of a rank, precision
    ("a100", "dgxa100_1x8x56x1", 1, 8, 56, "bf16"),
    ("a100", "dgxa100_8x8x48x1", 8, 8, 48, "bf16"),
    ("h100", "h100_1x8x96x1", 1, 8, 96, "fp8"),
    ("h200", "h200_1x8x96x1", 1, 8, 96, "fp8"),
    ("h200", "h200_8x8x48x1", 8, 8, 72, "fp8"),
    ("b200", "h200_1x8x96x1", 1, 8, 96, "fp8"),
    ("b200", "h200_2x8x48x1", 2, 8, 96, "fp8"),
    ("gb200", "h200_1x8x96x1", 1, 4, 144, "fp8"),
    ("gb200", "h200_1x8x96x1", 2, 4, 96, "fp8"),
    ("gb200", "h200_8x8x48x1", 16, 4, 72, "fp8"),
    ("gb200", "h200_32x8x12x1", 128, 4, 16, "fp8"),
)


def write() -> None:
    """Simulate all cases, and write their forecasts and the published minutes."""
    from bert_tools.plan.cluster.forecast import simulate
    from bert_tools.plan.entries import published_minutes
    from mlperf_bert.config.files import find_config, load_config

    rows = []
    for accelerator, name, nodes, ranks, batch, precision in CASES:
        settings = [
            f"model.precision={precision}",
            f"parallel.nodes={nodes}",
            f"parallel.ranks_per_node={ranks}",
            f"parallel.local_batch_size={batch}",
        ]
        found = simulate(load_config(find_config(name), settings), name, accelerator)
        machine = found.job.machine
        rows.append(
            {
                "accelerator": accelerator,
                "count": machine.world_size,
                "global_batch": machine.world_size * batch,
                "precision": precision,
                "forecast_min": found.run.seconds / 60,
                "published_min": published_minutes(
                    machine.accelerator.published_as, machine.world_size
                ),
            }
        )
    RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def table() -> list[str]:
    """Return the lines of the Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in json.loads(RECORD.read_text("utf-8")):
        published, forecast = row["published_min"], row["forecast_min"]
        times = f"{published[0]:.2f}"
        if len(published) > 1:
            times += f" to {published[-1]:.2f} ({len(published)} entries)"
        cells = (
            f"{row['count']} x {row['accelerator'].upper()}",
            f"{row['global_batch']:,}",
            row["precision"],
            f"{forecast:.2f}",
            times,
            f"{statistics.median(published) / forecast:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        write()
    else:
        print("\n".join(table()))
