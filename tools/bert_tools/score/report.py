"""Summarizes scores over seeds: means, intervals, differences, a table, sentences and a picture."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bert_tools.common.results import aligned, mean_and_half_width, new_figure, quantile_95

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 2
FINE_TUNED, PROBE = "fine-tuned", "frozen features"
BAG_OF_WORDS, MOST_FREQUENT = "bag of words", "most frequent class"
TFIDF_COSINE = "tf-idf cosine"
BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no difference shown"
_MEASURES = ("accuracy", "macro_f1")
_WORDS = {FINE_TUNED: "after fine-tuning", PROBE: "with frozen features"}
_COLORS, _GREY = ("#2f6db3", "#d9722e"), "#8a8a8a"  # the model, the other model, and baselines


@dataclass(frozen=True, slots=True)
class Score:
    """The scores (0 .. 1) of one way of classifying, with one seed.

    `model` is None for a baseline that uses no model.
    """

    way: str
    model: str | None
    seed: int
    accuracy: float
    macro_f1: float

    @property
    def method(self) -> str:
        """Return the name of the way and of its model, which is the same for all seeds."""
        return self.way if self.model is None else f"{self.model}, {self.way}"


def interval(values: Sequence[float], ratio: float, num_test: int) -> dict[str, float | None]:
    """Return the mean of values over seeds and the half-width of its 95% interval.

    The seeds share examples, so their values depend on each other, and the usual interval of a mean
    would be too narrow. The half-width is t * s * sqrt(1 / n + ratio), where `ratio` is the number
    of test examples per training example (Nadeau and Bengio 2003, doi:10.1023/A:1024068626366). The
    standard deviation s is at least that of one of the `num_test` test examples, because a few
    equal values do not show that there is no spread. The half-width is None for one seed.
    """
    mean, half_width = mean_and_half_width(values)
    if half_width is not None:
        least = quantile_95(len(values) - 1) / math.sqrt(len(values)) / num_test
        half_width = max(half_width, least) * math.sqrt(1 + len(values) * ratio)
    return {"mean": mean, "half_width": half_width}


def verdict(low: float | None, high: float | None) -> str:
    """Return in words what the interval of a difference shows. The bounds may be None."""
    if low is not None and low > 0:
        return BETTER
    return WORSE if high is not None and high < 0 else NO_DIFFERENCE


def summarize(
    scores: Sequence[Score], models: Sequence[str], ratio: float, num_test: int
) -> dict[str, Any]:
    """Return the scores with means, and the paired differences, as values for JSON.

    Each way of each model is compared with the bag of words, and each way of the first model with
    the same way of the other model.
    """

    def intervals(found: list[Score], other: list[Score] | None = None) -> dict[str, Any]:
        def values(name: str) -> list[float]:
            less = [getattr(each, name) for each in other] if other else [0.0] * len(found)
            return [getattr(a, name) - b for a, b in zip(found, less, strict=True)]

        return {name: interval(values(name), ratio, num_test) for name in _MEASURES}

    by_method: dict[str, list[Score]] = {}
    for each in scores:
        by_method.setdefault(each.method, []).append(each)
    means: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for method, found in by_method.items():
        way, model = found[0].way, found[0].model
        means.append({"method": method, "way": way, "model": model, **intervals(found)})
        against = [] if model is None else [BAG_OF_WORDS]
        if model == models[0]:
            against += [f"{other}, {way}" for other in models[1:]]
        for other in against:
            changes = intervals(found, by_method[other])
            mean, half = changes["accuracy"]["mean"], changes["accuracy"]["half_width"]
            bounds = (None, None) if half is None else (mean - half, mean + half)
            words = {"method": method, "compared_with": other, "verdict": verdict(*bounds)}
            differences.append({**words, "way": way, "model": model, **changes})
    return {"scores": [asdict(e) for e in scores], "means": means, "differences": differences}


def with_sign(found: dict[str, Any]) -> str:
    """Format the interval of a difference, such as `+0.031 ± 0.012`."""
    return f"{found['mean']:+.3f}" + _half_width(found)


def _half_width(found: dict[str, Any]) -> str:
    return "" if found["half_width"] is None else f" ± {found['half_width']:.3f}"


def table(result: dict[str, Any]) -> list[str]:
    """Return the lines of the tables of a result."""
    lines: list[str] = []
    if labelled := result.get("labelled"):
        changes = {
            each["method"]: with_sign(each["accuracy"])
            for each in labelled["differences"]
            if each["compared_with"] == BAG_OF_WORDS
        }
        rows = [
            [
                each["method"],
                *(f"{each[name]['mean']:.3f}{_half_width(each[name])}" for name in _MEASURES),
                changes.get(each["method"], "-"),
            ]
            for each in labelled["means"]
        ]
        header = ["method", "accuracy", "macro F1", "accuracy over bag of words"]
        lines += aligned(header, rows, left="method")
    if pairs := result.get("pairs"):
        rows = [
            [each["method"], f"{each['spearman']:.3f}", f"{each['low']:.3f} to {each['high']:.3f}"]
            for each in pairs["correlations"]
        ]
        lines += [""] if lines else []
        lines += aligned(["cosine similarity", "Spearman", "95%"], rows, left="cosine similarity")
    return lines


def conclusion(result: dict[str, Any]) -> list[str]:
    """Return one sentence for each baseline or model that the first model is compared with."""
    model, sentences = result["model"]["name"], []
    if labelled := result.get("labelled"):
        own = [each for each in labelled["differences"] if each["model"] == model]
        names = [BAG_OF_WORDS, *([result["against"]["name"]] if result["against"] else [])]
        for name in names:
            parts = [
                f"{each['verdict']} {_WORDS[each['way']]} (accuracy {with_sign(each['accuracy'])})"
                for each in own
                if each["compared_with"] in (name, f"{name}, {each['way']}")
            ]
            other = f"the {name}" if name == BAG_OF_WORDS else name
            sentences.append(f"{model} compared with {other}: {' and '.join(parts)}")
        if result["settings"]["seeds"] == 1:
            sentences[-1] += "; use --seeds 2 or more for intervals"
    for each in result.get("pairs", {}).get("differences", []):
        sentences.append(
            f"{model} compared with {each['compared_with']}: "
            f"{verdict(each['low'], each['high'])} at ranking pairs (Spearman "
            f"{each['spearman']:+.3f}, 95% from {each['low']:+.3f} to {each['high']:+.3f})"
        )
    return sentences


def picture(result: dict[str, Any]) -> "Figure":
    """Draw accuracies and rank correlations as bars with their 95% intervals."""
    bars = []  # the name, the model, the value, and the lengths of the interval on both sides
    for each in result.get("labelled", {}).get("means", ()):
        mean, half = each["accuracy"]["mean"], each["accuracy"]["half_width"] or 0.0
        bars.append((f"{each['method']}: accuracy", each["model"], mean, half, half))
    for each in result.get("pairs", {}).get("correlations", ()):
        name, value = f"{each['method']}: Spearman", each["spearman"]
        sides = max(0.0, value - each["low"]), max(0.0, each["high"] - value)
        bars.append((name, each["method"], value, *sides))
    names, owners, values, *sides_of_all = zip(*bars, strict=True)
    models = [each["name"] for each in (result["model"], result["against"]) if each]
    colors = dict(zip(models, _COLORS, strict=False))
    figure = new_figure(8, 0.6 + 0.35 * len(bars))
    axes = figure.subplots()
    axes.barh(
        names,
        values,
        xerr=sides_of_all,
        color=[colors.get(owner, _GREY) for owner in owners],
        error_kw={"capsize": 3},
    )
    axes.invert_yaxis()
    axes.set_title("with 95% intervals", fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
