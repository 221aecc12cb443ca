"""Published accuracy curves (published_curves.csv), and where a run lies beside them."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise

INITIAL_ACCURACY = 0.34085  # of MLPerf's initial checkpoint, before the first step
_FILE = "published_curves.csv"
_SAME_BATCH = 0.05  # a curve serves batches that differ from its own by so much at most


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracies of one published run after so many samples, ascending; the first at 0 samples."""

    name: str
    optimizer: str
    global_batch_size: int
    points: tuple[tuple[int, float], ...]

    def accuracy_at(self, samples: float) -> float:
        """Linear between points; after the last one, the last one's."""
        for (low, before), (high, after) in pairwise(self.points):
            if samples <= high:
                return before + (after - before) * (samples - low) / (high - low)
        return self.points[-1][1]

    def samples_at(self, accuracy: float) -> float | None:
        """Samples after which an accuracy is first reached; None where it is not."""
        for (low, before), (high, after) in pairwise(self.points):
            if before < accuracy <= after:
                return low + (high - low) * (accuracy - before) / (after - before)
        return None


def curves_for(global_batch_size: int, optimizer: str | None) -> list[Curve]:
    """Published curves of about this batch and of this optimizer, of any where that is None."""
    return [
        curve
        for curve in _published_curves()
        if abs(curve.global_batch_size / global_batch_size - 1) <= _SAME_BATCH
        and optimizer in (None, curve.optimizer)
    ]


def band_at(curves: Sequence[Curve], samples: float) -> tuple[float, float]:
    """Lowest and highest accuracy of the curves after so many samples."""
    accuracies = [curve.accuracy_at(samples) for curve in curves]
    return min(accuracies), max(accuracies)


@cache
def _published_curves() -> tuple[Curve, ...]:
    text = resources.files("bert_tools.report").joinpath(_FILE).read_text("utf-8")
    found: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        batch = int(row["global_batch_size"])
        points = found.setdefault((row["curve"], row["optimizer"], batch), [(0, INITIAL_ACCURACY)])
        points.append((int(row["step"]) * batch, float(row["mlm_accuracy"])))
    return tuple(Curve(*key, tuple(points)) for key, points in found.items())
