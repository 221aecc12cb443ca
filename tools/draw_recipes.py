"""Draw docs/pictures/hyperparameters.png, and print the table of docs/hyperparameters.md.

    .venv/bin/python tools/draw_recipes.py

Published sets, the curves that `plan/recipes.py` lays through them, and the samples to the target.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from mlperf_bert.config_checks import CLOSED_MOST_BATCH
from mlperf_bert.plan.convergence import convergence_points, expected_samples
from mlperf_bert.plan.recipes import LambRecipe, lamb_recipe, published_sets

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "hyperparameters.png"
SMALLEST = 256
BATCHES = np.unique(np.geomspace(SMALLEST, CLOSED_MOST_BATCH, 400).astype(int))
TABLE = (256, 448, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, CLOSED_MOST_BATCH)
MILLION = 1e6


def main() -> None:
    """Write the picture and print the table."""
    for batch in TABLE:
        print(table_row(batch))
    mpl.use("Agg")
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), layout="constrained", sharex=True)
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
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


def table_row(batch: int) -> str:
    """One row of the table in docs/hyperparameters.md."""
    recipe, expected = lamb_recipe(batch), expected_samples(batch)
    assert expected is not None, "the closed division has a point for every batch of a recipe"
    warm_up = f"{recipe.warmup_steps} ({recipe.start_warmup_step})" if recipe.warmup_steps else "0"
    cells = (
        f"{batch:,}",
        f"{recipe.learning_rate:g}",
        f"{recipe.beta_1:g}",
        f"{recipe.beta_2:g}",
        f"{recipe.weight_decay:g}",
        warm_up,
        f"{recipe.decay_steps:,}",
        f"{expected.mean:,.0f}",
        f"{expected.minimum:,.0f}",
        recipe.source,
    )
    return "| " + " | ".join(cells) + " |"


def draw(axes: Axes, label: str, **values: Callable[[LambRecipe], float]) -> None:
    """Curves over the batch, published sets as dots: hollow where no curve goes through."""
    curve = [lamb_recipe(int(batch)) for batch in BATCHES]
    for number, (name, value) in enumerate(values.items()):
        color = f"C{number}"
        axes.plot(BATCHES, [value(recipe) for recipe in curve], color=color, label=name)
        for each in published_sets():
            dot(axes, each.recipe, value(each.recipe), color if each.is_knot else "none", color)
    axes.set_ylabel(label)


def dot(axes: Axes, recipe: LambRecipe, value: float, face: str, edge: str) -> None:
    """One published set."""
    axes.scatter(recipe.global_batch_size, value, s=22, facecolors=face, edgecolors=edge, zorder=3)


def draw_convergence(axes: Axes) -> None:
    """Samples to the target: what the checker expects and demands, and the points it prunes."""
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
    main()
