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
from mlperf_bert.run.outcome import RunOutcome

Objective = Literal["samples", "time"]
Curve = tuple[tuple[int, float], ...]  # samples, and the accuracy after them


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """End and value of a training that ended by itself.

    `samples` are those to the target if reached, else all; `seconds` those of training alone.
    `needed` is the samples or seconds to the target, or the whole budget after a miss.
    """

    is_reached: bool
    why: str
    value: float
    needed: float
    samples: int
    seconds: float


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


def judged(
    curve: Curve, outcome: RunOutcome, objective: Objective, target: float, most_samples: int
) -> Result:
    """The result of an ended run, which may have diverged before its first evaluation.

    `most_samples` is the budget. In seconds it is taken by the rate of the run, as one that missed
    may have diverged early.
    """
    seconds = outcome.seconds
    reached = next((at for at, accuracy in curve if accuracy >= target), None)
    if reached is not None:
        needed = float(reached) if objective == "samples" else seconds
        why = f"reached {target:g} after {reached:,} samples, {seconds:.1f} s"
        return Result(
            is_reached=True,
            why=why,
            value=needed,
            needed=needed,
            samples=reached,
            seconds=seconds,
        )
    best = max((accuracy for _, accuracy in curve), default=0.0)
    budget = float(most_samples)
    if objective == "time":
        budget = seconds * max(1.0, most_samples / max(outcome.samples, 1))
    return Result(
        is_reached=False,
        why=f"missed {target:g}, {best:.4f} at best after {outcome.samples:,} samples",
        value=budget * (1 + (target - best) / target),
        needed=budget,
        samples=outcome.samples,
        seconds=seconds,
    )
