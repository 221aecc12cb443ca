"""A study as pictures: every trial in its order, and which settings mattered."""

import io
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bert_tools.tune.standing import DEFAULT
from bert_tools.tune.store import TrialRecord
from bert_tools.tune.summary import ArmSummary, Summary, unit_of

_COLOURS = ("#2f6db3", "#d9722e", "#2f7d4f", "#8a63b0", "#b8860b", "#8c564b")
_GREY = "#9a9a9a"
_MARKERS = {"reached": ("o", 6.0), "missed": ("x", 6.0)}  # whatever was stopped: a small dot


def history_picture(summary: Summary) -> bytes:
    """A PNG: samples or seconds to the target by trial, the best so far, and the default's mean."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    unit = unit_of(summary.settings.objective)
    for number, arm in enumerate(summary.arms):
        shift = 0.16 * (number - (len(summary.arms) - 1) / 2)
        _draw_arm(axes, arm, _COLOURS[number % len(_COLOURS)], summary, shift)
    for spread in summary.spreads:
        if spread.subject == DEFAULT:
            label = f"default, mean of {len(spread.seeds)} fresh seeds"
            axes.axhline(spread.mean, color="black", lw=1, ls="--", label=label)
            low, high = spread.mean - spread.deviation, spread.mean + spread.deviation
            axes.axhspan(low, high, color="black", alpha=0.07, lw=0)
    if summary.settings.objective == "samples":
        label = f"budget of a training, {summary.settings.most_samples:,} samples"
        axes.axhline(summary.settings.most_samples, color=_GREY, lw=1, ls=":", label=label)
        axes.set_ylim(0, 1.12 * summary.settings.most_samples)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("trials of the arm, in the order they began")
    axes.set_ylabel(f"{unit} to accuracy {summary.settings.config.eval.target_accuracy:g}")
    axes.set_title(
        "Every trial: circles reached the target, crosses missed it, small dots were stopped",
        fontsize=10,
    )
    _tidy(axes)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return _png(figure)


def importance_picture(summary: Summary) -> bytes | None:
    """A PNG: share of each setting in what told good trials from others; None of too few trials."""
    known = {name: shares for name, shares in summary.importance.items() if shares}
    if not known:
        return None
    rows = sum(len(shares) for shares in known.values())
    figure = Figure(figsize=(8, 1.4 + 0.32 * rows + 0.5 * len(known)), layout="constrained")
    panels = figure.subplots(
        len(known), 1, squeeze=False, height_ratios=[len(shares) for shares in known.values()]
    )
    colours = dict(zip((arm.name for arm in summary.arms), _COLOURS * 8, strict=False))
    judged = {arm.name: arm.counts["reached"] + arm.counts["missed"] for arm in summary.arms}
    for axes, (name, shares) in zip(panels[:, 0], known.items(), strict=True):
        _draw_shares(axes, f"{name}, of {judged[name]} trials", shares, colours[name])
    panels[-1, 0].set_xlabel("importance (PED-ANOVA), per cent of all settings of the arm")
    return _png(figure)


def _draw_arm(axes: Axes, arm: ArmSummary, colour: str, summary: Summary, shift: float) -> None:
    """One arm; `shift` moves it aside, so that equal results of two arms can be told apart."""
    ended = [each for each in arm.trials if each.status == "ended" and each.samples]
    best = float("inf")
    steps: list[tuple[float, float]] = []
    for place, trial in enumerate(ended, 1):
        height = _height(trial, summary)
        marker, size = _MARKERS.get(trial.ended or "", (".", 4.0))
        axes.plot([place + shift], [height], marker, color=colour, ms=size, alpha=0.8)
        if trial.ended == "reached":
            best = min(best, height)
        if best < float("inf"):
            steps.append((place + shift, best))
    label = f"{arm.name}: best so far"
    axes.step([x for x, _ in steps], [y for _, y in steps], where="post", color=colour, label=label)


def _height(trial: TrialRecord, summary: Summary) -> float:
    """Where it ended; a miss stands at the budget."""
    if summary.settings.objective == "time":
        return trial.seconds or 0.0
    return float(trial.samples or 0)


def _draw_shares(axes: Axes, title: str, shares: Mapping[str, float], colour: str) -> None:
    ordered: Sequence[tuple[str, float]] = sorted(shares.items(), key=lambda item: item[1])
    axes.barh([key for key, _ in ordered], [100 * share for _, share in ordered], color=colour)
    for place, (_, share) in enumerate(ordered):
        axes.text(100 * share, place, f" {share:.0%}", va="center", fontsize=8)
    axes.set_xlim(0, 112 * max(max(shares.values()), 0.01))
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()
