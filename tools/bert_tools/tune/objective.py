"""The value of a training: samples or seconds to the target, or a stated penalty for a miss.

A run that missed its target needed more than the budget by an unknown amount. It counts as the
whole budget times 1 + (target - best accuracy) / target: worse than every run that reached it
within the budget, and better the nearer it came. Such a number only ranks; it is never shown as
samples or seconds to the target.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bert_tools.report.run_files import read_metrics
from mlperf_bert.run.outcome import read_outcome

Objective = Literal["samples", "time"]
Ended = Literal["reached", "missed", "pruned", "refused", "failed", "interrupted"]
Curve = tuple[tuple[int, float], ...]  # samples, and the accuracy after them


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """End and value of a training; `value` is None for one that cannot be judged.

    `samples` are those to the target if reached, else all; `seconds` those of training alone.
    """

    ended: Ended
    why: str = ""
    value: float | None = None
    samples: int | None = None
    seconds: float | None = None
    curve: Curve = ()


def read_curve(run: Path) -> Curve:
    """The evaluations so far of the run in `run_<i>`; empty if it has written nothing yet.

    Raises DataError for a damaged file.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        return ()
    return tuple(
        (record["samples"], float(record["mlm_accuracy"]))
        for record in read_metrics(path)
        if record["mlm_accuracy"] is not None
    )


def read_result(run: Path, objective: Objective, target: float, most_samples: int) -> Result:
    """The result of an ended run, which may have diverged before its first evaluation.

    Raises DataError if it did not end in order.
    """
    outcome = read_outcome(run / "outcome.json")
    return judged(
        read_curve(run), outcome.samples, outcome.seconds, objective, target, most_samples
    )


def judged(
    curve: Curve,
    samples: int,
    seconds: float,
    objective: Objective,
    target: float,
    most_samples: int,
) -> Result:
    """The result by evaluations; `samples`, `seconds` of the whole run, `most_samples` allowed."""
    reached = next((at for at, accuracy in curve if accuracy >= target), None)
    if reached is not None:
        return Result(
            ended="reached",
            why=f"reached {target:g} after {reached:,} samples, {seconds:.1f} s",
            value=float(reached) if objective == "samples" else seconds,
            samples=reached,
            seconds=seconds,
            curve=curve,
        )
    best = max((accuracy for _, accuracy in curve), default=0.0)
    budget = budget_of(objective, samples, seconds, most_samples)
    return Result(
        ended="missed",
        why=f"missed {target:g}, {best:.4f} at best after {samples:,} samples",
        value=budget * (1 + (target - best) / target),
        samples=samples,
        seconds=seconds,
        curve=curve,
    )


def budget_of(objective: Objective, samples: int, seconds: float, most_samples: int) -> float:
    """The budget in seconds, by the rate of a run that missed, as it may have diverged early."""
    if objective == "samples":
        return float(most_samples)
    return seconds * max(1.0, most_samples / max(samples, 1))
