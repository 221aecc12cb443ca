"""study_fp8.py: runs of the train command, resuming, table and picture."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support import load_study, run_study


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_study("2026-11-21-fp8", "study_fp8")


def test_a_small_study(
    tool: ModuleType,
    tiny_config: Path,
    synthetic_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "study")
    run = ["run", "--data", str(synthetic_data), "--out", out, "--config", str(tiny_config)]
    run += ["--seeds", "3", "--max-steps", "2"]
    assert run_study(tool, *run) == run_study(tool, *run) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 runs to do" in printed and "0 of 2 runs to do" in printed
    for precision in tool.PRECISIONS:
        result = json.loads((tmp_path / f"study/runs/{precision}-seed3.json").read_bytes())
        assert result["config"]["model"]["precision"] == precision
        assert result["skipped_steps"] == 0
        ((samples, accuracy),) = result["curve"]
        assert samples == 64 and 0 <= accuracy <= 1
    assert run_study(tool, "table", "--out", out) == 0
    assert "fp8 less bf16" in (tmp_path / "study/table.md").read_text()
    assert (tmp_path / "study/fp8.png").read_bytes().startswith(b"\x89PNG")
    assert run_study(tool, *run[:-1], "3") == 2  # another config
    assert "give another --out" in capsys.readouterr().err


def result_of(precision: str, seed: int, *accuracies: float) -> dict[str, Any]:
    curve = [[(number + 1) * 10, value] for number, value in enumerate(accuracies)]
    return {"curve": curve, "config": {"model": {"precision": precision}, "run": {"seed": seed}}}


def test_the_table_compares_seed_by_seed(tool: ModuleType) -> None:
    results = [
        result_of("bf16", 1, 0.1, 0.2),
        result_of("fp8", 1, 0.1, 0.22),
        result_of("bf16", 2, 0.3, 0.4),
        result_of("fp8", 2, 0.3, 0.4),
        result_of("bf16", 3, 0.9, 0.9),  # no run to compare it with yet
    ]
    lines = tool.in_words(tool.curves_of(results)).splitlines()
    assert lines[0] == "| accuracy | 10 | 20 samples |"
    deviation = (0.02 / 2) * 2**0.5
    assert (
        lines[-1] == f"| fp8 less bf16, seed by seed | 0.0000 ± 0.0000 | 0.0100 ± {deviation:.4f} |"
    )
    assert lines[2].startswith("| bf16 | 0.2000 ± 0.1414 |")
