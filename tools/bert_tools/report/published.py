"""The verdict on a run's accuracy, compared with published curves or reference points.

The curves are in published_curves.csv. Samples are compared, not accuracies: a curve that is late
by a tenth looks far off where it is steep.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Literal

from bert_tools.report.run import Evaluation, Task
from mlperf_bert.evaluation.convergence import expected_samples

INITIAL_ACCURACY = 0.34085  # of MLPerf's initial checkpoint, before the first step
_SAME_BATCH = 0.05  # most difference of a batch from a curve's own

LATE, FAR_TOO_LATE = 1.15, 1.5  # times the samples of the compared runs
NOISE = 0.01  # of an accuracy, between runs
# Used if only the samples to the target are known. Published curves are within 0.01 of the target
# from two thirds of their samples on.
LAST_PART, NEAR, FAR = 0.8, 0.03, 0.08

Kind = Literal["on track", "behind", "off", "cannot be judged"]


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracies of one published run after so many samples, ascending; the first at 0 samples."""

    name: str
    optimizer: str
    global_batch_size: int
    points: tuple[tuple[int, float], ...]

    def accuracy_at(self, samples: float) -> float:
        """The accuracy after `samples`: linear between points, constant after the last one."""
        for (low, before), (high, after) in pairwise(self.points):
            if samples <= high:
                return before + (after - before) * (samples - low) / (high - low)
        return self.points[-1][1]

    def samples_at(self, accuracy: float) -> float | None:
        """Samples after which an accuracy is first reached; None if it is not."""
        for (low, before), (high, after) in pairwise(self.points):
            if before < accuracy <= after:
                return low + (high - low) * (accuracy - before) / (after - before)
        return None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict of one of four kinds, and the comparison behind it in one line."""

    kind: Kind
    why: str


def curves_for(task: Task) -> list[Curve]:
    """Published curves of about a task's batch and of its optimizer, or of any if it has none."""
    if not task.is_reference or task.global_batch_size is None:
        return []
    return [
        curve
        for curve in _published_curves()
        if abs(curve.global_batch_size / task.global_batch_size - 1) <= _SAME_BATCH
        and task.optimizer in (None, curve.optimizer)
    ]


@cache
def _published_curves() -> tuple[Curve, ...]:
    text = resources.files(__package__).joinpath("published_curves.csv").read_text("utf-8")
    found: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        batch = int(row["global_batch_size"])
        points = found.setdefault((row["curve"], row["optimizer"], batch), [(0, INITIAL_ACCURACY)])
        points.append((int(row["step"]) * batch, float(row["mlm_accuracy"])))
    return tuple(Curve(*key, tuple(points)) for key, points in found.items())


def convergence_point(task: Task) -> float | None:
    """MLPerf's mean samples to the target at a task's batch, for tasks without a curve."""
    if not task.is_reference or task.global_batch_size is None or curves_for(task):
        return None
    point = expected_samples(task.global_batch_size)
    return point.mean if point else None


def published_samples(task: Task) -> list[float]:
    """Samples to the target of the published runs, or of the convergence point; none if unknown."""
    target = task.target_accuracy
    if target is None:
        return []
    reached = [samples for each in curves_for(task) if (samples := each.samples_at(target))]
    point = None if reached else convergence_point(task)
    return reached or ([point] if point is not None else [])


def judge(task: Task, evaluations: Sequence[Evaluation], guess: float | None = None) -> Verdict:
    """Judge by the last evaluation; without a curve by `guess`, that without context."""
    if not evaluations:
        return _cannot("there is no evaluation yet")
    last, target = evaluations[-1], task.target_accuracy
    if not task.has_target:
        return _by_guess(task, evaluations, guess)
    if target is None:
        return _cannot("the log does not say its target, nor that it is MLPerf's")
    has_reached = last.accuracy >= target
    if not task.is_reference or task.global_batch_size is None:
        if has_reached:
            why = f"{_reached(target, last)}; nothing is published to compare"
            return Verdict("on track", why)
        return _by_guess(task, evaluations, guess)
    expected = max(published_samples(task), default=None)
    if expected is None:
        return _cannot(f"nothing is published for a global batch of {task.global_batch_size:,}")
    if has_reached:
        ratio = last.samples / expected
        why = f"{_reached(target, last)}, {ratio:.2f} times the {expected:,.0f} published for this"
        return Verdict(_kind(ratio <= LATE, ratio <= FAR_TOO_LATE), f"{why} batch")
    curves = curves_for(task)
    return _by_curve(last, curves) if curves else _by_expected(target, last, expected)


def _by_guess(task: Task, evaluations: Sequence[Evaluation], guess: float | None) -> Verdict:
    best = max(each.accuracy for each in evaluations)
    why = f"best accuracy {best:.4f} in {evaluations[-1].samples:,} samples"
    why += f", {best / guess:.2f} x the context-free guess" if guess else ""
    if task.target_accuracy is None:
        why += "; the run has no target"
    else:
        why += f"; the target {task.target_accuracy:g} is not reached, and no published curve fits"
    if guess and best <= guess:
        return Verdict("behind", why)
    return Verdict("on track", why) if not task.has_target else _cannot(why)


def _by_curve(last: Evaluation, curves: Sequence[Curve]) -> Verdict:
    now, late, far_too_late = (
        [curve.accuracy_at(last.samples / times) for curve in curves]
        for times in (1, LATE, FAR_TOO_LATE)
    )
    why = (
        f"accuracy {last.accuracy:.4f} after {last.samples:,} samples; {len(curves)} published "
        f"runs of this batch had {min(now):.4f} to {max(now):.4f}"
    )
    is_on_track = last.accuracy >= min(late) - NOISE
    return Verdict(_kind(is_on_track, last.accuracy >= min(far_too_late) - NOISE), why)


def _by_expected(target: float, last: Evaluation, expected: float) -> Verdict:
    progress, missing = last.samples / expected, target - last.accuracy
    why = (
        f"accuracy {last.accuracy:.4f} after {last.samples:,} samples; the target of "
        f"{target:g} takes about {expected:,.0f} at this batch"
    )
    if progress < LAST_PART:
        return _cannot(f"{why}, and no curve up to there is published")
    is_on_track = progress <= LATE and missing <= NEAR
    return Verdict(_kind(is_on_track, progress <= FAR_TOO_LATE and missing <= FAR), why)


def _kind(is_on_track: bool, is_behind: bool) -> Kind:
    return "on track" if is_on_track else "behind" if is_behind else "off"


def _cannot(why: str) -> Verdict:
    return Verdict("cannot be judged", why)


def _reached(target: float, last: Evaluation) -> str:
    return f"reached {target:g} after {last.samples:,} samples"
