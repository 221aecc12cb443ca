"""Drawing of the pictures in docs/pictures/.

    .venv/bin/python tools/draw_pictures.py policies | recipes

policy_<name>.png: 16 sequences of the published lengths for two nodes of two ranks, assigned by the
functions that training uses; where two policies give the same batches, one picture shows both.
hyperparameters.png: published sets, the curves of `plan/recipes.py` through them, and the samples
to the target.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from bert_tools.common.figures import new_figure, png
from bert_tools.plan.recipes import LambRecipe, lamb_recipe, published_sets
from mlperf_bert.config.run_config import CLOSED_MOST_BATCH
from mlperf_bert.data.balance import Balance
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.evaluation.convergence import convergence_points, expected_samples

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
DOTS_PER_INCH = 110
NODES, RANKS_PER_NODE, LOCAL_BATCH_SIZE = 2, 2, 4
RANKS = NODES * RANKS_PER_NODE
SEED = 11
MOST_TOKENS = 1600
NUMBER = {"ha": "center", "va": "center", "fontsize": 7}
POLICIES = {
    "none": ("none", Balance()),
    "exchange_global_one_direction": (
        "exchange_global, one direction",
        Balance(policy="exchange_global", deal="one_direction"),
    ),
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

SMALLEST = 256
BATCHES = np.unique(np.geomspace(SMALLEST, CLOSED_MOST_BATCH, 400).astype(int))
MILLION = 1e6


def policies() -> None:
    """Write a picture for each policy."""
    lengths = wikipedia_lengths().draw_evenly(RANKS * LOCAL_BATCH_SIZE, SEED)
    for name, (title, balance) in POLICIES.items():
        picture = draw_policy(lengths, title, balance)
        (PICTURES / f"policy_{name}.png").write_bytes(picture)


def draw_policy(lengths: np.ndarray, title: str, balance: Balance) -> bytes:
    """Stack the sequences of each rank; the dashed line is the mean of the ranks."""
    assignment = balance(lengths.astype(np.float64).reshape(RANKS, 1, LOCAL_BATCH_SIZE))
    hands = np.split(lengths[assignment.places], np.cumsum(assignment.counts)[:-1])
    loads = np.array([hand.sum() for hand in hands])
    figure = new_figure(4.2, 2.6)
    axes = figure.subplots()
    shade = mpl.colormaps["viridis_r"]
    for rank, hand in enumerate(hands):
        bottoms = np.cumsum(hand) - hand
        axes.bar(rank, hand, 0.7, bottoms, color=shade(hand / 512), edgecolor="white")
        for bottom, length in zip(bottoms, hand, strict=True):
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


def recipes() -> None:
    """Write the picture."""
    figure = new_figure(9, 6)
    axes = figure.subplots(2, 2, sharex=True)
    draw(axes[0, 0], "learning rate", rate=lambda recipe: recipe.learning_rate)
    draw(
        axes[0, 1],
        "1 - beta",
        beta_1=lambda recipe: 1 - recipe.beta_1,
        beta_2=lambda recipe: 1 - recipe.beta_2,
    )
    draw(axes[1, 0], "weight decay", decay=lambda recipe: recipe.weight_decay)
    draw(
        axes[1, 1],
        "million samples",
        schedule=lambda recipe: recipe.decay_steps * recipe.global_batch_size / MILLION,
    )
    draw_convergence(axes[1, 1])
    for each in axes.flat:
        each.set_xscale("log", base=2)
        each.grid(alpha=0.3)
        if each is not axes[1, 1]:
            each.set_yscale("log")
    for each in axes[:, 1]:
        each.legend(fontsize=7)
    for each in axes[1]:
        each.set_xlabel("global batch")
    (PICTURES / "hyperparameters.png").write_bytes(png(figure, DOTS_PER_INCH))


def draw(axes: Any, label: str, **values: Callable[[LambRecipe], float]) -> None:
    """Draw curves over the batch, and published sets as dots, hollow if no curve meets them."""
    curve = [lamb_recipe(int(batch)) for batch in BATCHES]
    for number, (name, value) in enumerate(values.items()):
        color = f"C{number}"
        axes.plot(BATCHES, [value(recipe) for recipe in curve], color=color, label=name)
        for each in published_sets():
            dot(axes, each, value(each), color if each.role == "knot" else "none", color)
    axes.set_ylabel(label)


def dot(axes: Any, recipe: LambRecipe, value: float, face: str, edge: str) -> None:
    """Draw one published set."""
    axes.scatter(recipe.global_batch_size, value, s=22, facecolors=face, edgecolors=edge, zorder=3)


def draw_convergence(axes: Any) -> None:
    """Draw samples to the target: the checker's mean, its limit, and the points it prunes."""
    expected = [each for each in map(expected_samples, BATCHES.tolist()) if each]
    mean = [each.mean / MILLION for each in expected]
    least = [each.minimum / MILLION for each in expected]
    axes.plot(BATCHES, mean, color="C2", label="expected to the target (RCP)")
    axes.plot(BATCHES, least, color="C2", linestyle=":", label="least mean that passes")
    for point in convergence_points():
        face = "C2" if point.in_pruned_set else "none"
        mean_samples = point.mean_samples / MILLION
        axes.scatter(point.global_batch_size, mean_samples, s=22, facecolors=face, edgecolors="C2")


if __name__ == "__main__":
    {"policies": policies, "recipes": recipes}[sys.argv[1]]()
