"""docs/cluster_model.md says what its log says, and the log what the simulator says today."""

import json
from typing import Any

import pytest

from bert_tools.plan.cluster.machine import constant_rows, default_constants
from support import REPOSITORY, load_study

calibrate = load_study("2026-11-22-cluster-model", "calibrate")
LOG = REPOSITORY / "logs" / "2026-11-22-cluster-model"
PAGE = (REPOSITORY / "docs" / "cluster_model.md").read_text(encoding="utf-8")


def millions(row: dict[str, Any], which: str) -> str:
    return f"{row[f'{which}_samples'] / 1e6:.2f} M"


def logged(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((LOG / name).read_text(encoding="utf-8"))
    return found


def test_every_class_stands_on_the_page_with_its_error() -> None:
    rows = logged("calibrate.json")["steps"]
    assert {row["id"] for row in rows} == {step.id for step in calibrate.published_steps()}
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
    for step in calibrate.published_steps():
        expected = pytest.approx(rows[step.id]["predicted_ms"], rel=1e-3)
        assert calibrate.compare(step, constants).predicted_ms == expected


def test_constants_on_the_page_are_those_in_force() -> None:
    for row in constant_rows():
        assert f"| `{row.name}` | {row.value:.4g} | {row.low:g} to {row.high:g} |" in PAGE


def test_samples_on_the_page_are_those_expected_today() -> None:
    rows = logged("calibrate.json")["steps"]
    apart = [row for row in rows if f"| {row['id']} | {millions(row, 'published')} |" in PAGE]
    for row in apart:
        expected = millions(row, "expected")
        line = f"| {millions(row, 'published')} | {expected} | {row['samples_error']:+.1%} |"
        assert f"| {row['id']} {line}" in PAGE
    left_out = [row for row in rows if row not in apart]
    assert all(abs(row["samples_error"]) < 1e-3 for row in left_out)
    good = sum(abs(row["samples_error"]) <= 0.15 for row in apart)
    assert f"{good} of these {len(apart)} lie within 15 %" in PAGE


def test_the_simulator_still_expects_the_samples_of_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calibrate.main(["--json"])
    today = json.loads(capsys.readouterr().out)["steps"]
    expected = {row["id"]: row["expected_samples"] for row in logged("calibrate.json")["steps"]}
    assert {row["id"]: row["expected_samples"] for row in today} == pytest.approx(expected)


def test_constants_frozen_before_the_comparison_stand_beside_those_shipped() -> None:
    frozen = (LOG / "freeze.txt").read_text(encoding="utf-8")
    for name, value, unit in (
        ("matrix_efficiency", "0.889", ""),
        ("kernel_overhead_us", "7.73", " us"),
        ("host_launch_us", "56.3", " us"),
        ("network_efficiency", "0.643", ""),
    ):
        assert f"{name} {value} " in frozen
        assert f"| {value}{unit} |" in PAGE
    shipped = {row.name: f"{row.value:.4g}" for row in constant_rows()}
    line = "| shipped, fitted after it | {} | {} us | {} us | {} |"
    names = ("matrix_efficiency", "kernel_overhead_us", "host_launch_us", "network_efficiency")
    assert line.format(*(shipped[name] for name in names)) in PAGE


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


@pytest.mark.parametrize(
    ("log", "numbers"),
    [
        ("calibrate.txt", ["17 of 19"]),
        ("paper_captured.txt", ["64.5 ms", "+22.7 ms", "+7.1 ms", "+1.1 ms"]),
        ("lamb_4096.txt", ["34.3 ms", "31.7 ms"]),
        ("sweep_local_4.txt", ["34.3 ms", "37.0 ms", "11.6 s", "12.5 s"]),
        ("sweep_global_16384.txt", ["11.7 s", "5.6 s"]),
    ],
)
def test_numbers_in_the_story_of_scaling_stand_in_their_log(log: str, numbers: list[str]) -> None:
    text = (LOG / log).read_text(encoding="utf-8")
    story = (REPOSITORY / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert [number for number in numbers if number not in text or number not in story] == []
