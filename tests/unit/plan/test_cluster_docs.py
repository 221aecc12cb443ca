"""docs/cluster_model.md says what its log says, and the log what the simulator says today."""

import json
from typing import Any

import pytest

from mlperf_bert.plan.cluster.calibration import compare, published_steps
from mlperf_bert.plan.cluster.constants import constant_rows, default_constants
from support import REPOSITORY

LOG = REPOSITORY / "logs" / "2026-11-22-cluster-model"
PAGE = (REPOSITORY / "docs" / "cluster_model.md").read_text(encoding="utf-8")


def logged(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((LOG / name).read_text(encoding="utf-8"))
    return found


def test_every_class_stands_on_the_page_with_its_error() -> None:
    rows = logged("calibrate.json")["steps"]
    assert {row["id"] for row in rows} == {step.id for step in published_steps()}
    for row in rows:
        line = (
            f"| {row['id']} | {row['accelerators']:,} | {row['role'].replace('_', ' ')} | "
            f"{row['published_ms']:.1f} ms | {row['predicted_ms']:.1f} ms | {row['error']:+.1%} |"
        )
        assert line in PAGE
    held_out = [abs(row["error"]) for row in rows if row["role"] == "held_out"]
    good = sum(error <= 0.15 for error in held_out)
    mean = sum(held_out) / len(held_out)
    words = f"Held out: {good} of {len(held_out)} within the goal of 15 %, mean {100 * mean:.1f} %"
    assert words in PAGE


def test_the_simulator_still_gives_what_the_log_says() -> None:
    constants = default_constants()
    rows = {row["id"]: row for row in logged("calibrate.json")["steps"]}
    for step in published_steps():
        expected = pytest.approx(rows[step.id]["predicted_ms"], rel=1e-3)
        assert compare(step, constants).predicted_ms == expected


def test_constants_on_the_page_are_those_in_force() -> None:
    for row in constant_rows():
        assert f"| `{row.name}` | {row.value:.4g} | {row.low:g} to {row.high:g} |" in PAGE


def test_what_techniques_buy_is_what_was_simulated() -> None:
    found = logged("paper_captured.json")
    for row in found["ablation"]:
        assert f"{row['step_ms']:.1f} ms | {row['difference_ms']:+.1f} ms |" in PAGE
    seconds = f"{found['run']['seconds']:.1f} s"
    assert f"| {found['step_ms']:.1f} ms | 2,932,736 (published) | {seconds} |" in PAGE


@pytest.mark.parametrize(
    ("log", "numbers"),
    [
        ("samsung_x1024.txt", ["107.4 ms", "22.3 s", "+16.8 ms", "-28.5 ms", "+15.4 ms"]),
        ("lamb_4096.txt", ["34.3 ms", "+12.2 ms", "+31.7 ms", "+7.2 ms"]),
        ("open_adamw_x8.txt", ["160.1 ms", "253.5 s", "635,500"]),
        ("sweep_local_4.txt", ["32.6 ms", "34.3 ms", "37.0 ms", "23.5 s"]),
        ("sweep_global_16384.txt", ["11.7 s", "5.6 s"]),
    ],
)
def test_other_numbers_on_the_page_stand_in_their_log(log: str, numbers: list[str]) -> None:
    text = (LOG / log).read_text(encoding="utf-8")
    assert [number for number in numbers if number not in text] == []
    assert [number for number in numbers if number not in PAGE] == []
