"""Numbers of docs/cluster_model.md are those that the simulator gives, or stand in their log."""

import json
from typing import Any

import pytest

from bert_tools.plan.cluster.machine import constant_rows
from mlperf_bert.__main__ import main
from support import REPOSITORY, load_study

calibrate = load_study("2026-11-22-cluster-model", "calibrate")
LOG = REPOSITORY / "logs" / "2026-11-22-cluster-model"
PAGE = (REPOSITORY / "docs" / "cluster_model.md").read_text(encoding="utf-8")
STORY = (REPOSITORY / "docs" / "scaling.md").read_text(encoding="utf-8")
SHOWN = {  # log -> numbers from it on the page, numbers from it in the story of scaling
    "calibrate.txt": ("", "17 of 19"),
    "samsung_x1024.txt": ("107.4 ms, 22.3 s, +16.8 ms, -28.5 ms, +15.4 ms", ""),
    "paper_captured.txt": ("", "64.5 ms, +22.7 ms, +7.1 ms, +1.1 ms"),
    "lamb_4096.txt": ("34.3 ms, +12.2 ms, +31.7 ms, +7.2 ms", "34.3 ms, 31.7 ms"),
    "open_adamw_x8.txt": ("160.1 ms, 253.5 s, 635,500", ""),
    "sweep_local_4.txt": ("32.6 ms, 34.3 ms, 37.0 ms, 23.5 s", "34.3 ms, 37.0 ms, 11.6 s, 12.5 s"),
    "sweep_global_16384.txt": ("11.7 s, 5.6 s", "11.7 s, 5.6 s"),
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Every published class beside what is simulated of it now."""
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", printed.append)
        calibrate.main(["--json"])
    found: list[dict[str, Any]] = json.loads(printed[0])["steps"]
    return found


def test_every_class_stands_on_the_page_with_its_error(rows: list[dict[str, Any]]) -> None:
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


def test_samples_on_the_page_are_those_expected_today(rows: list[dict[str, Any]]) -> None:
    apart = []
    for row in rows:
        published, expected = (
            f"{row[f'{which}_samples'] / 1e6:.2f} M" for which in ("published", "expected")
        )
        if f"| {row['id']} | {published} |" in PAGE:
            apart.append(row)
            line = f"| {row['id']} | {published} | {expected} | {row['samples_error']:+.1%} |"
            assert line in PAGE
        else:
            assert abs(row["samples_error"]) < 1e-3
    good = sum(abs(row["samples_error"]) <= 0.15 for row in apart)
    assert f"{good} of these {len(apart)} lie within 15 %" in PAGE


def test_constants_on_the_page_are_those_in_force() -> None:
    shipped = {row.name: f"{row.value:.4g}" for row in constant_rows()}
    for row in constant_rows():
        assert f"| `{row.name}` | {shipped[row.name]} | {row.low:g} to {row.high:g} |" in PAGE
    # Beside them those that were frozen before the comparison.
    names = ("matrix_efficiency", "kernel_overhead_us", "host_launch_us", "network_efficiency")
    line = "| shipped, fitted after it | {} | {} us | {} us | {} |"
    assert line.format(*(shipped[name] for name in names)) in PAGE
    frozen = (LOG / "freeze.txt").read_text(encoding="utf-8")
    for name, value in zip(names, ("0.889", "7.73", "56.3", "0.643"), strict=True):
        assert f"{name} {value} " in frozen
        assert f"| {value}{' us' if name.endswith('_us') else ''} |" in PAGE


def test_what_techniques_buy_is_what_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan cluster --nodes 128 --gpus-per-node 8 --local-batch-size 16 --recipe open_adam"
    words += " --sampler strata_6_3_2_5 --balance presort_local --start-up-s 2.15 --ablation --json"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    for row in found["ablation"]:
        assert f"{row['step_ms']:.1f} ms | {row['difference_ms']:+.1f} ms |" in PAGE
    seconds = f"{found['run']['seconds']:.1f} s"
    assert f"| {found['step_ms']:.1f} ms | 2,932,736 (published) | {seconds} |" in PAGE


def test_other_numbers_stand_in_their_log() -> None:
    for log, shown in SHOWN.items():
        text = (LOG / log).read_text(encoding="utf-8")
        for page, numbers in zip((PAGE, STORY), shown, strict=True):
            for number in filter(None, numbers.split(", ")):
                assert number in text and number in page, (log, number)
