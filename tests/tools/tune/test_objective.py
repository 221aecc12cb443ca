"""What a training counts: what it needed, or a penalty that ranks misses."""

import pytest

from bert_tools.tune.objective import Objective, Result, judged
from mlperf_bert.run.outcome import RunOutcome

CURVE = ((100, 0.2), (200, 0.35), (300, 0.3))


def result(
    curve: tuple[tuple[int, float], ...],
    objective: Objective,
    target: float,
    *,
    samples: int = 300,
    seconds: float = 6.0,
) -> Result:
    outcome = RunOutcome(
        status="aborted",
        steps=10,
        samples=samples,
        seconds=seconds,
        mlm_accuracy=None,
        stopped_by=None,
    )
    return judged(curve, outcome, objective, target, 1000)


def test_what_reached_the_target_counts_what_it_needed() -> None:
    assert result(CURVE, "samples", 0.35).samples == 200
    assert not result(CURVE, "samples", 0.36).is_reached
    assert result(CURVE, "samples", 0.2).value == 100
    assert result(CURVE, "time", 0.3).value == 6.0


def test_a_miss_is_worse_than_the_whole_budget_and_better_the_nearer_it_came() -> None:
    assert result(CURVE, "samples", 0.7).value == pytest.approx(1500)  # half of the target missed
    assert 1000 < result(((300, 0.6),), "samples", 0.7).value < 1500
    diverged = result((), "samples", 0.7, samples=40, seconds=1.0)
    assert (diverged.value, diverged.needed) == (2000, 1000)
    # Six seconds for 300 samples are twenty for a budget of 1,000.
    assert result(CURVE, "time", 0.7).value == pytest.approx(30)
