"""Draws the pictures of docs/how/cluster_model.md with the simulator: draw_cluster_model.py DIR."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from bert_tools.common.figures import new_figure, png
from bert_tools.plan.cluster.machine import default_constants
from bert_tools.plan.cluster.question import ablation_picture, sweep_picture, timeline_picture
from bert_tools.plan.cluster.simulation import ablation, simulate, sweep
from bert_tools.plan.sample_index import wikipedia_index
from calibrate import Compared, compare, published_steps
from cluster_answers import AS_PUBLISHED, LAMB, PAPER, PAPER_NODES

NAMED_ERROR = 0.15  # of a class that the picture names

NO_START = replace(PAPER, start_up_s=0.0)


def main() -> None:
    """Write five PNG files into the directory."""
    out = Path(sys.argv[1])
    index = wikipedia_index()
    for name, question in {"published": AS_PUBLISHED, "captured": PAPER_NODES}.items():
        found = simulate(question, index)
        (out / f"cluster_timeline_{name}.png").write_bytes(png(timeline_picture(found)))
    found = simulate(PAPER, index)
    rows = ablation(found, index)
    (out / "cluster_techniques.png").write_bytes(png(ablation_picture(found, rows)))
    series = {
        "closed LAMB, 4 a GPU": list(sweep(LAMB, "local", index)),
        "closed LAMB, global batch 4,096": list(sweep(LAMB, "global", index)),
        "open Adam, global batch 16,384": list(sweep(NO_START, "global", index)),
    }
    (out / "cluster_sizes.png").write_bytes(png(sweep_picture(series)))
    compared = [compare(step, default_constants()) for step in published_steps()]
    (out / "cluster_calibration.png").write_bytes(png(calibration_picture(compared)))


def calibration_picture(compared: Sequence[Compared]) -> Figure:
    """Simulated against published steps, fitted, held-out and other classes apart."""
    figure = new_figure(6.6, 6)
    axes = figure.subplots()
    ends = np.array([15.0, 280.0])
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(
        ends, 0.85 * ends, 1.15 * ends, color="#9a9a9a", alpha=0.2, label="within 15 %"
    )
    for role, colour in (("fitted", "#8a63b0"), ("held_out", "#d9722e"), ("other", "#7fb3d8")):
        chosen = [each for each in compared if each.published.role == role]
        name = "another accelerator" if role == "other" else role.replace("_", " ")
        axes.scatter(
            [each.published.step_ms for each in chosen],
            [each.predicted_ms for each in chosen],
            color=colour,
            label=f"{name} ({len(chosen)} classes)",
            zorder=3,
        )
        for each in chosen:
            if abs(each.error) > NAMED_ERROR:
                at = each.published.step_ms, each.predicted_ms
                axes.annotate(
                    f"{each.published.id} {each.error:+.0%}",
                    at,
                    (-32, -16),
                    textcoords="offset points",
                    fontsize=7,
                )
    axes.set(xscale="log", yscale="log", xlabel="published step, ms", ylabel="simulated step, ms")
    axes.set(xlim=ends, ylim=ends)
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False, loc="upper left")
    return figure


if __name__ == "__main__":
    main()
