"""Draw docs/pictures/hyperparameters.png, and print two tables of docs/hyperparameters.md.

    .venv/bin/python tools/draw_recipes.py

Published sets, the curves that `plan/recipes.py` lays through them, and the samples to the target.
The first table is a model of the seconds to the target, from two published throughputs.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bert_tools.plan.recipes import LambRecipe, lamb_recipe, published_sets
from mlperf_bert.config.run_config import CLOSED_MOST_BATCH
from mlperf_bert.evaluation.convergence import convergence_points, expected_samples

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "hyperparameters.png"
SMALLEST = 256
BATCHES = np.unique(np.geomspace(SMALLEST, CLOSED_MOST_BATCH, 400).astype(int))
TABLE = (256, 448, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, CLOSED_MOST_BATCH)
MILLION = 1e6
GPUS_PER_NODE = 8
# NVIDIA, DGX A100 in v2.1: nodes, global batch, sequences/s.
THROUGHPUTS = ((8, 3072, 18_119), (128, 4096, 110_241))
MODEL_NODES = (16, 32, 64, 128)
MODEL_BATCHES = (3072, 4096, 4608, 6144, 8192)


def main() -> None:
    """Write the picture and print the tables."""
    fixed_s, sequence_s = step_model()
    print(f"a step: {1e3 * fixed_s:.1f} ms + {1e3 * sequence_s:.2f} ms a sequence of a GPU")
    for nodes in MODEL_NODES:
        print(model_row(nodes, fixed_s, sequence_s))
    print()
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


def step_model() -> tuple[float, float]:
    """Seconds of a step, and more for each sequence of a GPU: the line through THROUGHPUTS."""
    (few, few_s), (many, many_s) = sorted(
        (batch / (nodes * GPUS_PER_NODE), batch / sequences_per_s)
        for nodes, batch, sequences_per_s in THROUGHPUTS
    )
    sequence_s = (many_s - few_s) / (many - few)
    return few_s - few * sequence_s, sequence_s


def model_row(nodes: int, fixed_s: float, sequence_s: float) -> str:
    """Seconds to the target at each batch; empty where the GPUs cannot share the batch evenly."""
    cells = [str(nodes)]
    for batch in MODEL_BATCHES:
        sequences, rest = divmod(batch, nodes * GPUS_PER_NODE)
        expected = expected_samples(batch)
        assert expected is not None, "the closed division has a point for every batch here"
        seconds = expected.mean / batch * (fixed_s + sequences * sequence_s)
        cells.append("" if rest else f"{seconds:.1f}")
    return "| " + " | ".join(cells) + " |"


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
            dot(axes, each, value(each), color if each.role == "knot" else "none", color)
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
