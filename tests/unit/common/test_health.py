"""Alarms about losses, accuracies and skipped steps: each when it is due, and once."""

import json
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.common.health import Health

MASKED_TOKENS = 20_000


def records(losses: Iterable[float | None], first_step: int = 20) -> list[dict[str, Any]]:
    """One of each 20 steps."""
    return [
        {"step": first_step + 20 * n, "loss": loss, "mlm_accuracy": None, "skipped_steps": 0}
        for n, loss in enumerate(losses)
    ]


def kinds(judged: Sequence[dict[str, Any]], health: Health | None = None) -> list[tuple[str, int]]:
    """(kind, step) of every alarm."""
    health = health or Health(MASKED_TOKENS)
    return [(alarm.kind, record["step"]) for record in judged for alarm in health.alarms(record)]


def falling(count: int, noise: float, seed: int = 0) -> list[float]:
    drawn = random.Random(seed)
    return [2 + 8 * math.exp(-n / 20) + drawn.gauss(0, noise) for n in range(count)]


def test_a_noisy_falling_loss_raises_nothing() -> None:
    for seed in range(50):
        assert kinds(records(falling(200, 0.3, seed))) == []


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ([9.0, 9.0, *[2.0] * 38], 0),  # a jump that comes back
        ([7.0] * 50, 1),  # rises and stays
        ([2 + 0.05 * n for n in range(60)], 1),  # slowly
        ([7.0] * 20 + [2.0] * 40 + [7.0] * 20, 2),  # recovers between
    ],
)
def test_a_loss_that_rises_and_stays_is_told_once(after: list[float], told: int) -> None:
    found = kinds(records(falling(100, 0.05) + after))
    assert [kind for kind, _ in found] == ["diverged"] * told
    if after[0] == 7.0:
        assert 2020 <= found[0][1] <= 2100  # within five records


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told_once_until_it_is_one(loss: float | None) -> None:
    found = kinds(records([3.0, loss, loss, 2.9, loss]))
    assert found == [("not_finite", 40), ("not_finite", 100)]


def evaluated(accuracies: Iterable[float]) -> list[dict[str, Any]]:
    judged = records(10 - 0.01 * n for n, _ in enumerate(accuracies))
    return [{**record, "mlm_accuracy": a} for record, a in zip(judged, accuracies, strict=True)]


def test_a_collapsed_accuracy_is_told_once_until_it_is_back() -> None:
    found = kinds(evaluated([0.34, 0.6, 0.7, 0.4, 0.3, 0.7, 0.2]))
    assert found == [("collapsed", 80), ("collapsed", 140)]


def test_an_accuracy_within_the_noise_of_its_set_is_no_collapse() -> None:
    accuracies = [0.30, 0.33, 0.26, 0.34, 0.27]
    assert kinds(evaluated(accuracies), Health(100)) == []
    assert kinds(evaluated(accuracies), Health(MASKED_TOKENS)) != []


def test_a_long_share_of_skipped_steps_is_told_with_their_count() -> None:
    judged = records([3.0] * 40)
    for record in judged[20:]:
        record["skipped_steps"] = 5
    health = Health(MASKED_TOKENS)
    lines = [alarm.line for record in judged for alarm in health.alarms(record)]
    assert len(lines) == 1 and "of the last steps were skipped, 15 in all" in lines[0]


def test_a_loss_scale_that_finds_its_level_raises_nothing() -> None:
    judged = records([3.0] * 40)
    judged[0]["skipped_steps"] = 2
    judged[20]["skipped_steps"] = 1
    assert kinds(judged) == []


def test_a_resumed_run_judges_alike() -> None:
    judged = records(falling(100, 0.05) + [7.0] * 50)
    judged[50]["mlm_accuracy"], judged[120]["mlm_accuracy"] = 0.7, 0.3
    whole = kinds(judged)
    assert len(whole) == 2
    for cut in (1, 99, 101, 130):
        before, after = Health(MASKED_TOKENS), Health(MASKED_TOKENS)
        found = kinds(judged[:cut], before)
        after.restore(json.loads(json.dumps(before.state(), allow_nan=False)))
        assert found + kinds(judged[cut:], after) == whole


def test_an_empty_state_is_that_of_a_new_run() -> None:
    judged = records([math.nan])
    health = Health(MASKED_TOKENS)
    assert kinds(judged, health) and not kinds(judged, health)
    health.restore({})
    assert kinds(judged, health)


def test_a_state_of_something_else_is_refused() -> None:
    health = Health(MASKED_TOKENS)
    others = [
        health.state() | wrong for wrong in ({"more": 1.0}, {"step": "x"}, {"step": math.nan})
    ]
    for wrong in ({"step": 1.0}, *others):
        with pytest.raises(CheckpointError, match="state of health"):
            health.restore(wrong)  # type: ignore[arg-type]
