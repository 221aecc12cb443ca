"""The measured rows of `plan balance` as a picture: what is lost, by sampler and policy."""

import io
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bert_tools.plan.balance_rows import BalanceRow, Question

LEAST_SHOWN = 1e-4  # a share below this is drawn as this: the scale is logarithmic
BAR_INCHES = 0.19

_COLOURS = {
    "none": "#9a9a9a",
    "exchange_global one_direction": "#f4b183",
    "exchange_global snake": "#d9722e",
    "exchange_local one_direction": "#c9b3dd",
    "exchange_local snake": "#8a63b0",
    "presort_local snake": "#7fb3d8",
    "presort_global": "#2f7d4f",
    "presort_global unequal": "#123f26",
}


def balance_picture(question: Question, rows: Sequence[BalanceRow]) -> bytes:
    """A PNG of two panels of bars: imbalance above 1, and capacity waste; both logarithmic."""
    figure = Figure(figsize=(13, 2.2 + BAR_INCHES * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw(left, rows, [row.imbalance_tokens - 1 for row in rows])
    left.set_xlabel("tokens of the slowest rank above the mean (lower is better)")
    _draw(right, rows, [row.capacity_waste for row in rows])
    right.set_xlabel("token capacity above the mean that holds every draw")
    _name_samplers(left, rows)
    handles, labels = _legend_of(left)
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"What unequal lengths cost: {question.world_size} ranks x "
        f"{question.local_batch_size} sequences ({question.gpus_per_node} ranks a node)"
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _draw(axes: Axes, rows: Sequence[BalanceRow], shares: Sequence[float]) -> None:
    for place, row, share in zip(_places(rows), rows, shares, strict=True):
        shown = max(share, LEAST_SHOWN)
        name = row.policy_in_words
        axes.barh(place, shown, height=0.85, color=_COLOURS[name], label=name)
        text = f" {share:.2%}" if share >= LEAST_SHOWN else f" below {LEAST_SHOWN:.2%}"
        axes.text(shown, place, text, va="center", fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(LEAST_SHOWN / 2, 4 * max(*shares, LEAST_SHOWN))
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _places(rows: Sequence[BalanceRow]) -> list[float]:
    """Where each bar stands: from the top, with a gap between samplers."""
    samplers = list(dict.fromkeys(row.sampler for row in rows))
    return [-number - 1.2 * samplers.index(row.sampler) for number, row in enumerate(rows)]


def _name_samplers(axes: Axes, rows: Sequence[BalanceRow]) -> None:
    groups: dict[str, list[float]] = {}
    for place, row in zip(_places(rows), rows, strict=True):
        groups.setdefault(row.sampler, []).append(place)
    axes.set_yticks([sum(group) / len(group) for group in groups.values()], list(groups))
    axes.tick_params(axis="y", length=0)


def _legend_of(axes: Axes) -> tuple[list[Artist], list[str]]:
    handles, labels = axes.get_legend_handles_labels()
    first = {label: handle for handle, label in reversed(list(zip(handles, labels, strict=True)))}
    return list(first.values())[::-1], list(first)[::-1]
