"""`tools/summarise_gpu.py`: goals of the device, how parts and tests ended, in few words."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support import REPOSITORY, run_process

SUMMARY = REPOSITORY / "tools" / "summarise_gpu.py"
TRAIN: dict[str, Any] = {
    "device": "cuda",
    "device_name": "NVIDIA H200",
    "samples_per_s": 1000.0,
    "step_ms": 112.0,
    "tflops": 500.0,
    "mfu": 0.7,
    "mfu_of_burst": 0.6,
    "padding_share": 0.01,
    "memory_peak_bytes": 2**33,
}


def write_part(out: Path, name: str, status: int, result: Mapping[str, Any] | None) -> None:
    with (out / "plan.tsv").open("a", encoding="utf-8") as file:
        file.write(f"1\t{name}.json\t20\tbench {name}\n")
    with (out / "parts.tsv").open("a", encoding="utf-8") as file:
        file.write(f"{name}\t{status}\t3\n")
    if result is not None:
        (out / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    (out / f"{name}.log").write_text("progress\nlast words\n", encoding="utf-8")


def summary(out: Path, status: int = 0) -> str:
    done = run_process(sys.executable, SUMMARY, out)
    assert done.returncode == status, done.stderr
    return done.stdout


def test_summary_judges_the_goals(tmp_path: Path) -> None:
    write_part(tmp_path, "train_bf16", 0, TRAIN)
    write_part(tmp_path, "train_fp8", 0, {**TRAIN, "samples_per_s": 1100.0})
    write_part(tmp_path, "train_batch_4_captured", 0, {**TRAIN, "samples_per_s": 90.0})
    write_part(tmp_path, "train_batch_4_eager", 0, {**TRAIN, "samples_per_s": 50.0})
    write_part(tmp_path, "ablation_none", 0, {**TRAIN, "samples_per_s": 800.0})
    write_part(tmp_path, "ablation_eager", 0, {**TRAIN, "samples_per_s": 720.0, "mfu": None})
    write_part(tmp_path, "profile_bf16", 0, {"step_ms": "of another form"})
    write_part(tmp_path, "checkpoints", 0, {"schema_version": 1, "median_ratio": 1.23456})
    write_part(tmp_path, "optimizer", 2, None)
    write_part(tmp_path, "scale", 124, None)
    write_part(tmp_path, "cost", 1, None)
    words = summary(tmp_path, status=1)
    assert "| bf16 samples/s, first | at least 950 | met: 1000 |" in words
    assert "| bf16 samples/s, goal | at least 1030 | missed: 1000 |" in words
    assert "| FP8 samples/s, first | at least 1092 | met: 1100 |" in words
    assert "| FP8 samples/s, goal | at least 1250 | missed: 1100 |" in words
    assert "| captured / eager at 4 sequences | at least 1.5 | met: 1.8 |" in words
    assert "| evaluation, share of a run | at most 0.028 | not measured |" in words
    assert "| ablation_eager | 0.900 | 720.0 |" in words
    assert "not summarised: KeyError" in words  # and all others are
    assert "- checkpoints: `{median_ratio: 1.234}`" in words
    assert "cannot run here: last words" in words
    assert "stopped, took too long: last words" in words
    assert "failed (1): last words" in words


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("NVIDIA H100 80GB HBM3", ["850", "900", "1139", "1200"]),
        ("NVIDIA H200", ["950", "1030", "1092", "1250"]),
        ("NVIDIA GH200 480GB", []),
    ],
)
def test_goals_are_those_of_the_device(tmp_path: Path, name: str, bounds: list[str]) -> None:
    write_part(tmp_path, "train_bf16", 0, {**TRAIN, "device_name": name})
    lines = summary(tmp_path).splitlines()
    found = [line.split(" | ")[1] for line in lines if "samples/s, " in line]
    assert found == [f"at least {bound}" for bound in bounds]
    assert any("| train_bf16 | 1.000 | 1000.0 |" in line for line in lines)
    assert bounds or any(line.startswith("Not judged") for line in lines)


def test_summary_of_a_cpu_judges_nothing(tmp_path: Path) -> None:
    write_part(tmp_path, "train_bf16", 0, {**TRAIN, "device": "cpu"})
    words = summary(tmp_path)
    assert "Not run on a GPU" in words
    assert "met" not in words.split()


def test_summary_says_which_tests_failed_and_which_never_ended(tmp_path: Path) -> None:
    write_part(tmp_path, "train_bf16", 0, TRAIN)
    ended = "tests/gpu/test_a.py::test_b FAILED\nFAILED tests/gpu/test_a.py::test_b - assert 0\n"
    ended += "========= 1 failed, 2 passed in 1.50s ==========\n"
    (tmp_path / "test_a.txt").write_text(ended, encoding="utf-8")
    hangs = "tests/gpu/test_c.py::test_d PASSED\ntests/gpu/test_c.py::test_e \nTimeout!\n  File"
    (tmp_path / "test_c.txt").write_text(hangs, encoding="utf-8")
    words = summary(tmp_path)
    assert "| test_a | 1 failed, 2 passed in 1.50s |" in words
    assert "- FAILED tests/gpu/test_a.py::test_b - assert 0" in words
    assert "| test_c | cut off in tests/gpu/test_c.py::test_e |" in words


def test_summary_fits_what_is_shown_of_a_run(tmp_path: Path) -> None:
    for number in range(30):
        write_part(tmp_path, f"part_{number}", 0, {"rows": ["words"] * 10_000})
    words = summary(tmp_path)
    assert len(words) < 11_000
    assert "cut off: the archive has all" in words
