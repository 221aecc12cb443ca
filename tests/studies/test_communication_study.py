"""study_communication_precision.py: its sums against float64, torch and hand-made cases."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from support import load_study, run_study

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_study("2026-11-21-communication-precision", "study_communication_precision")


def spread_numbers(num_ranks: int, num_elements: int) -> np.ndarray:
    rng = np.random.default_rng(7)
    scales = 2.0 ** rng.integers(-30, 12, num_elements)
    return (rng.standard_normal((num_ranks, num_elements)) * scales).astype(np.float32)


@pytest.mark.parametrize("wire", list(DTYPES))
def test_rounding_is_torchs(tool: ModuleType, wire: str) -> None:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, -65519, 0], np.float32)
    for values in (spread_numbers(1, 4096)[0], ties):
        expected = torch.from_numpy(values).to(DTYPES[wire]).float().numpy()
        np.testing.assert_array_equal(tool.WIRES[wire](values), expected)


@pytest.mark.parametrize("wire", list(DTYPES))
def test_ring_adds_one_rank_after_the_other_as_torch_would(tool: ModuleType, wire: str) -> None:
    num_ranks, per_part = 8, 5
    values = spread_numbers(num_ranks, num_ranks * per_part)
    parts = torch.from_numpy(values).to(DTYPES[wire]).view(num_ranks, num_ranks, per_part)
    expected = []
    for part in range(num_ranks):
        total = parts[part, part]
        for hop in range(1, num_ranks):
            total = total + parts[(part + hop) % num_ranks, part]
        expected.append(total.float())
    found = tool.ring_sum(values, tool.WIRES[wire])
    np.testing.assert_array_equal(found, torch.cat(expected).numpy())


@pytest.mark.parametrize("order", ["ring", "tree"])
def test_fp32_sums_are_those_of_float64_but_for_rounding(tool: ModuleType, order: str) -> None:
    values = spread_numbers(64, 640)
    exact = values.sum(axis=0, dtype=np.float64)
    bound = 64 * np.finfo(np.float32).eps * np.abs(values).sum(axis=0)
    assert (np.abs(tool.ORDERS[order](values, tool.to_fp32) - exact) <= bound).all()


def test_a_ring_in_bf16_stands_still_where_a_tree_is_exact(tool: ModuleType) -> None:
    # 256 + 1 lies between two neighbours of bf16, 256 and 258, and the tie goes to 256.
    ones = np.ones((1024, 1024), np.float32)
    assert (tool.ring_sum(ones, tool.to_bf16) == 256).all()
    assert (tool.tree_sum(ones, tool.to_bf16) == 1024).all()


def test_only_scaling_before_keeps_fp16_finite(tool: ModuleType) -> None:
    values = np.full((16, 16), 8192, np.float32)
    values[:, :4] = 16
    for order in ("ring", "tree"):
        assert tool.mean_error(values, order, tool.Format("fp16", False)) == (0.0, 0.75)
        assert tool.mean_error(values, order, tool.Format("fp16", True)) == (0.0, 0.0)


def test_scaling_by_a_power_of_two_changes_nothing_in_bf16(tool: ModuleType) -> None:
    values = tool.made_up_gradients(16, 1.0, seed=3)
    after, before = (tool.mean_error(values, "ring", tool.Format("bf16", s)) for s in (False, True))
    assert after == before
    assert 0 < after[0] < 0.1


def test_made_up_gradients_agree_as_much_as_asked(tool: ModuleType) -> None:
    alike, apart = (tool.made_up_gradients(64, noise, seed=1) for noise in (0.1, 32.0))
    for values in (alike, apart):
        assert tool.LARGEST_SCALED / 2 < np.abs(values).max() <= tool.LARGEST_SCALED
    assert np.corrcoef(alike[:2])[0, 1] > 0.9
    assert abs(np.corrcoef(apart[:2])[0, 1]) < 0.2


def test_command_writes_numbers_picture_and_table(
    tool: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "new"
    assert run_study(tool, "--out", out, "--ranks", 16, "--seeds", 3) == 0
    answer = json.loads((out / "communication_precision.json").read_text())
    assert answer["schema_version"] == 1
    assert {row["ranks"] for row in answer["rows"]} == {8, 16}
    assert all(len(row["errors"]) == len(row["overflowed"]) == 3 for row in answer["rows"])
    combinations = len(tool.CASES) * len(tool.ORDERS) * len(tool.FORMATS)
    assert len(answer["rows"]) == 2 * combinations
    assert len(capsys.readouterr().out.splitlines()) == 2 + combinations
    assert (out / "communication_precision.png").read_bytes().startswith(b"\x89PNG")


def test_sizes_that_the_study_cannot_take_are_refused(tool: ModuleType, tmp_path: Path) -> None:
    for arguments in (("--ranks", "12"), ("--ranks", "4"), ("--seeds", "2")):
        assert run_study(tool, "--out", tmp_path / "new", *arguments) == 2
        assert not (tmp_path / "new").exists()
