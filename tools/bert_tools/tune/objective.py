"""What a training was worth: samples or seconds to the target, or a stated penalty for a miss.

A run that missed its target needed more than the budget, nobody knows how much more. It counts as
the whole budget times 1 + (target - best accuracy) / target: worse than every run that reached it
within the budget, and better the nearer it came. Such a number only ranks; it is never shown as
samples or seconds to the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bert_tools.report.run_files import read_metrics
from mlperf_bert.run.outcome import read_outcome

Objective = Literal["samples", "time"]
Ended = Literal["reached", "missed", "pruned", "refused", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The accuracy after so many samples."""

    samples: int
    accuracy: float


Curve = tuple[Evaluation, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one training showed; `seconds` are those of training alone."""

    curve: Curve
    samples: int
    seconds: float

    @property
    def best_accuracy(self) -> float:
        """0 where there was no evaluation."""
        return max((each.accuracy for each in self.curve), default=0.0)


def read_curve(run: Path) -> Curve:
    """The evaluations so far of the run in `run_<i>`; none where it has written nothing yet.

    Raises DataError for a file that is damaged.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        return ()
    return tuple(
        Evaluation(record["samples"], float(record["mlm_accuracy"]))
        for record in read_metrics(path)
        if record["mlm_accuracy"] is not None
    )


def read_measured(run: Path) -> Measured:
    """What a run that has ended showed; no evaluation of one that diverged before the first.

    Raises DataError where it did not end in order.
    """
    outcome = read_outcome(run / "outcome.json")
    curve = read_curve(run)
    return Measured(curve=curve, samples=outcome.samples, seconds=outcome.seconds)


def samples_to(target: float, curve: Sequence[Evaluation]) -> int | None:
    """Samples at the first evaluation at or above the target; None where there is none."""
    return next((each.samples for each in curve if each.accuracy >= target), None)


def value_of(measured: Measured, objective: Objective, target: float, most_samples: int) -> float:
    """The number to make small: samples or seconds to the target, or the penalty of a miss."""
    reached = samples_to(target, measured.curve)
    if reached is not None:
        return float(reached) if objective == "samples" else measured.seconds
    budget = float(most_samples)
    if objective == "time":
        budget = budget_seconds(measured.seconds, measured.samples, most_samples)
    return budget * (1 + (target - measured.best_accuracy) / target)


def budget_seconds(seconds: float, samples: int, most_samples: int) -> float:
    """Of the whole budget, by the rate of a run that missed; it may have ended before, diverged."""
    return seconds * max(1.0, most_samples / max(samples, 1))
