"""Drawing of the pictures in docs/pictures/.

    .venv/bin/python tools/draw_pictures.py policies

policy_<name>.png: 16 sequences of the published lengths for two nodes of two ranks, assigned by the
functions that training uses; where two policies give the same batches, one picture shows both.
"""

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np

from bert_tools.common.length_histogram import wikipedia_lengths
from bert_tools.common.results import new_figure, png
from mlperf_bert.data.balance import Balance

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
DOTS_PER_INCH = 110
NODES, RANKS_PER_NODE, LOCAL_BATCH_SIZE = 2, 2, 4
RANKS = NODES * RANKS_PER_NODE
SEED = 11
MOST_TOKENS = 1600
NUMBER = {"ha": "center", "va": "center", "fontsize": 7}
POLICIES = {
    "none": ("none", Balance()),
    "exchange_global_snake": ("exchange_global, snake", Balance(policy="exchange_global")),
    "local": (
        "exchange_local, presort_local (snake)",
        Balance(policy="presort_local", ranks_per_node=RANKS_PER_NODE),
    ),
    "presort_global": ("presort_global", Balance(policy="presort_global")),
    "presort_global_unequal": (
        "presort_global, unequal counts",
        Balance(policy="presort_global", counts="unequal"),
    ),
}


def policies() -> None:
    """Write a picture for each policy."""
    lengths = wikipedia_lengths().draw_evenly(RANKS * LOCAL_BATCH_SIZE, SEED)
    for name, (title, balance) in POLICIES.items():
        picture = draw_policy(lengths, title, balance)
        (PICTURES / f"policy_{name}.png").write_bytes(picture)


def draw_policy(lengths: np.ndarray, title: str, balance: Balance) -> bytes:
    """Stack the sequences of each rank; the dashed line is the mean of the ranks."""
    assignment = balance(lengths.astype(np.float64).reshape(RANKS, 1, LOCAL_BATCH_SIZE))
    of_ranks = np.split(lengths[assignment.places], np.cumsum(assignment.counts)[:-1])
    loads = np.array([of_rank.sum() for of_rank in of_ranks])
    figure = new_figure(4.2, 2.6)
    axes = figure.subplots()
    shade = mpl.colormaps["viridis_r"]
    for rank, of_rank in enumerate(of_ranks):
        bottoms = np.cumsum(of_rank) - of_rank
        axes.bar(rank, of_rank, 0.7, bottoms, color=shade(of_rank / 512), edgecolor="white")
        for bottom, length in zip(bottoms, of_rank, strict=True):
            if length >= 60:  # room for its number
                color = "white" if length > 256 else "black"
                axes.text(rank, bottom + length / 2, str(length), color=color, **NUMBER)
    axes.axhline(loads.mean(), color="black", linestyle="--", linewidth=1)
    names = [f"rank {rank}\nnode {rank // RANKS_PER_NODE}" for rank in range(RANKS)]
    axes.set_xticks(range(RANKS), names, fontsize=8)
    axes.set_ylim(0, MOST_TOKENS)
    axes.set_ylabel("tokens", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_title(f"{title}: imbalance {loads.max() / loads.mean():.3f}", fontsize=9)
    return png(figure, DOTS_PER_INCH)


if __name__ == "__main__":
    {"policies": policies}[sys.argv[1]]()
