"""Whether a run's accuracy is where it should be: beside published curves, or reference points.

Times are compared, not heights: a curve that is late by a tenth looks far off where it is steep.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bert_tools.report.curves import Curve, band_at, curves_for
from bert_tools.report.run import Evaluation, Run
from mlperf_bert.evaluation.convergence import expected_samples

Kind = Literal["on track", "behind", "off", "cannot be judged"]

LATE, FAR_TOO_LATE = 1.15, 1.5  # times the samples of the runs compared with
NOISE = 0.01  # of an accuracy, between runs
# Where only the samples to the target are known. The published curves are within 0.01 of the target
# from two thirds of their samples on.
LAST_PART, NEAR, FAR = 0.8, 0.03, 0.08


@dataclass(frozen=True, slots=True)
class Verdict:
    """One of four words, and the comparison behind it in one line."""

    kind: Kind
    why: str


def judge(run: Run) -> Verdict:
    """By the last evaluation, or by the one that reached the target."""
    if not run.evaluations:
        return _cannot("there is no evaluation yet")
    last, target = run.evaluations[-1], run.target_accuracy
    if target is None:
        return _cannot("the log does not say its target, nor that it is MLPerf's")
    has_reached = last.accuracy >= target
    if not run.is_reference or run.global_batch_size is None:
        if has_reached:
            why = f"{_reached(target, last)}; nothing is published to compare"
            return Verdict("on track", why)
        return _cannot("no curve is published but of BERT-large on MLPerf's target, 0.72 at 512")
    curves = curves_for(run.global_batch_size, run.optimizer)
    expected = _expected(run.global_batch_size, curves, target)
    if expected is None:
        return _cannot(f"nothing is published for a global batch of {run.global_batch_size:,}")
    if has_reached:
        return _by_samples(target, last, expected)
    return _by_curve(last, curves) if curves else _by_expected(target, last, expected)


def expected_of(run: Run) -> float | None:
    """Samples to the target that are published for this run's batch; None where none are."""
    if not run.is_reference or run.global_batch_size is None or run.target_accuracy is None:
        return None
    curves = curves_for(run.global_batch_size, run.optimizer)
    return _expected(run.global_batch_size, curves, run.target_accuracy)


def _expected(batch: int, curves: Sequence[Curve], target: float) -> float | None:
    """The curves' own samples where there are some, else the reference convergence point's."""
    reached = [samples for curve in curves if (samples := curve.samples_at(target)) is not None]
    if reached:
        return max(reached)
    point = expected_samples(batch)
    return point.mean if point else None


def _by_samples(target: float, last: Evaluation, expected: float) -> Verdict:
    ratio = last.samples / expected
    why = (
        f"{_reached(target, last)}, {ratio:.2f} times the {expected:,.0f} published for this batch"
    )
    return Verdict(_kind(ratio <= LATE, ratio <= FAR_TOO_LATE), why)


def _by_curve(last: Evaluation, curves: Sequence[Curve]) -> Verdict:
    low, high = band_at(curves, last.samples)
    late, far_too_late = (
        band_at(curves, last.samples / times)[0] - NOISE for times in (LATE, FAR_TOO_LATE)
    )
    why = (
        f"accuracy {last.accuracy:.4f} after {last.samples:,} samples; {len(curves)} published "
        f"runs of this batch had {low:.4f} to {high:.4f}"
    )
    return Verdict(_kind(last.accuracy >= late, last.accuracy >= far_too_late), why)


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
