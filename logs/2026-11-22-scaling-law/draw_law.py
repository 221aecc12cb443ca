"""Draw docs/pictures/scaling_law.png: where time = a * p^b comes from, for four sets of entries.

    python draw_law.py

The sets are those of docs/how/scaling.md, out of the shipped table.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bert_tools.plan.entries import Entry, chosen, published_entries
from bert_tools.plan.scaling_law import CEREBRAS, PowerLaw, ScalingLaw, fit_law

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "scaling_law.png"
NVIDIA_A100 = ("submitter=NVIDIA", "division=closed", "accelerator~A100")
SETS = {
    "A100, v0.7 (3 logs)": ("round=0.7", *NVIDIA_A100),
    "A100, v1.1": ("round=1.1", *NVIDIA_A100),
    "A100, v2.1": ("round=2.1", *NVIDIA_A100),
    "H100, v3.0 and v3.1": ("submitter~NVIDIA", "round>=3.0", "round<=3.1", "accelerator~H100"),
}
COLOURS = ("#c9a227", "#8a63b0", "#1f5f8b", "#2f7d4f")
IDEAL, CEREBRAS_COLOUR, HARDWARE, STATISTICS = "#9a9a9a", "#d9722e", "#7fb3d8", "#b2478b"
GRID = np.geomspace(8, 4096, 50)


def main() -> None:
    """Write the picture."""
    mpl.use("Agg")
    laws = {name: fit_law(entries(words)) for name, words in SETS.items()}
    figure, axes = plt.subplots(2, 2, figsize=(10.5, 7.6), layout="constrained")
    time, throughput, samples, split = axes.flat
    draw(time, laws, lambda law: law.time, lambda entry: entry.time_min)
    time.plot(GRID, [CEREBRAS.at(p) for p in GRID], "--", color=CEREBRAS_COLOUR, zorder=1)
    time.text(500, 3.1, "228.3 * p^-0.7392", color=CEREBRAS_COLOUR, fontsize=8)
    time.plot(GRID, 18 * 8 / GRID, ":", color=IDEAL)
    time.text(330, 0.05, "ideal: slope -1", color=IDEAL, fontsize=8)
    time.set_title("minutes to the target = samples / throughput", fontsize=10)
    time.legend(fontsize=7.5, frameon=False, loc="lower left")
    draw(throughput, laws, lambda law: law.throughput, lambda entry: entry.seq_per_s)
    throughput.plot(GRID, 2400 * GRID / 8, ":", color=IDEAL)
    throughput.text(500, 3e5, "ideal: slope 1", color=IDEAL, fontsize=8, ha="right")
    throughput.set_title("sequences/s: the hardware's part", fontsize=10)
    draw(samples, laws, lambda law: law.samples, lambda entry: (entry.samples or 0) / 1e6, 1e-6)
    samples.set_yticks([2.5, 3, 4, 5], ["2.5", "3", "4", "5"])
    samples.set_title("million samples to the target: the statistical part", fontsize=10)
    draw_split(split, laws)
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


def entries(words: tuple[str, ...]) -> list[Entry]:
    """The entries of a set that have logs."""
    found = chosen(published_entries(), words)
    return [entry for entry in found if entry.time_min and entry.accelerators]


def draw(
    axes: Axes,
    laws: dict[str, ScalingLaw],
    part: Callable[[ScalingLaw], PowerLaw | None],
    value: Callable[[Entry], float | None],
    scale: float = 1.0,
) -> None:
    """Dots and fitted lines of one quantity, both axes logarithmic."""
    for colour, (name, law) in zip(COLOURS, laws.items(), strict=True):
        fit = part(law)
        assert fit is not None, "all of these entries have their samples"
        sizes = [entry.accelerators or 0 for entry in law.entries]
        axes.scatter(sizes, [value(each) or 0 for each in law.entries], s=20, color=colour)
        grid = np.geomspace(min(sizes), max(sizes), 20)
        label = f"{name}: {scale * fit.coefficient:,.4g} p^{fit.exponent:.3f}"
        axes.plot(grid, [scale * fit.at(p) for p in grid], color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda tick, _: f"{tick:,.0f}")
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:,.10g}")
    axes.set_xlabel("accelerators p")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw_split(axes: Axes, laws: dict[str, ScalingLaw]) -> None:
    """How each exponent falls short of -1: throughput that lags, and samples that grow."""
    for row, (name, law) in enumerate(laws.items()):
        assert law.throughput is not None and law.samples is not None
        lag, growth = 1 - law.throughput.exponent, law.samples.exponent
        axes.barh(row, lag, left=-1, color=HARDWARE, height=0.55)
        axes.barh(row, growth, left=-1 + lag, color=STATISTICS, height=0.55)
        axes.text(-1 + lag / 2, row, f"{lag:.3f}", ha="center", va="center", fontsize=8)
        middle = -1 + lag + growth / 2
        axes.text(middle, row, f"{growth:.3f}", ha="center", va="center", fontsize=7, color="w")
        axes.text(-0.985 + lag + growth, row, f"{law.time.exponent:.3f}", va="center", fontsize=9)
        axes.text(-1, row - 0.36, name, fontsize=8)
    axes.set_xlim(-1, -0.5)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlabel("-1 (ideal) + what throughput lags (blue) + what samples grow (red)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title("the exponent, split", fontsize=10)


if __name__ == "__main__":
    main()
