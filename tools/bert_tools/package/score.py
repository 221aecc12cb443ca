"""The score of ten runs: MLPerf's olympic mean (training rules, section on scoring)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bert_tools.package.own_checks import SystemResults


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A system's result; times in minutes, in the order of the runs, before any scaling.

    `scaling_factor` is what the reference convergence points make of runs that needed fewer samples
    than the reference does (closed division); elsewhere 1.
    """

    system: str
    division: str
    score_minutes: float
    scaling_factor: float
    times_minutes: tuple[float, ...]
    accuracies: tuple[float, ...]
    caches_cleared: int


def olympic_mean(minutes: Sequence[float]) -> float:
    """The mean without the one fastest and the one slowest; at least three are needed."""
    middle = sorted(minutes)[1:-1]
    return math.fsum(middle) / len(middle)


def score_of(results: SystemResults, scaling_factor: float) -> Score:
    """The score of a system that passed all checks."""
    minutes = tuple(run.minutes for run in results.runs)
    return Score(
        system=results.name,
        division=results.division,
        score_minutes=olympic_mean(minutes) * scaling_factor,
        scaling_factor=scaling_factor,
        times_minutes=minutes,
        accuracies=tuple(run.accuracy for run in results.runs),
        caches_cleared=sum(run.cache_cleared for run in results.runs),
    )


def in_words(score: Score) -> str:
    """Three lines for people."""
    scaled = "" if score.scaling_factor == 1 else f", scaled by {score.scaling_factor:.4f}"
    times = " ".join(f"{minutes:.3f}" for minutes in score.times_minutes)
    return (
        f"{score.system} ({score.division}): {score.score_minutes:.3f} minutes, the olympic mean "
        f"of {len(score.times_minutes)} runs{scaled}\n"
        f"  times {times}\n"
        f"  accuracy {min(score.accuracies):.4f} or better; page cache dropped before "
        f"{score.caches_cleared} of {len(score.times_minutes)} runs"
    )
