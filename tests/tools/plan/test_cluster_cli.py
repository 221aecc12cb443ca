"""`mlperf_bert plan cluster`: what it prints and draws, and what it refuses in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from bert_tools.plan.cluster.simulation import sweep_nodes
from mlperf_bert.__main__ import main

SIZES = ("--nodes", "2", "--gpus-per-node", "4", "--local-batch-size", "4", "--draws", "2")
PNG = b"\x89PNG\r\n"


@pytest.fixture
def words(histogram: Path) -> list[str]:
    return ["plan", "cluster", *SIZES, "--histogram", str(histogram)]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["schema_version"] == 1 and found["kind"] == "simulation"
    return found


def test_the_parts_are_the_step_and_the_steps_the_run(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    found = answer(capsys, *words, "--samples", "1e5", "--start-up-s", "3", "--skipped-steps", "2")
    assert found["global_batch_size"] == 32 and found["world_size"] == 8
    assert sum(found["parts_ms"].values()) == pytest.approx(found["step_ms"])
    run = found["run"]
    assert run["steps"] == 3125 and run["skipped_steps"] == 2
    seconds = 3 + (3127 * run["step_ms"] + run["evaluations"] * run["evaluation_ms"]) / 1e3
    assert run["seconds"] == pytest.approx(seconds)
    assert found["ablation"] == [] and found["sweep"] == [] and found["timeline"] is None


def test_samples_are_told_with_their_range(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    estimate = answer(capsys, *words)["samples_to_target"]
    assert estimate["low"] < estimate["samples"]
    assert main(words) == 0
    spread = f"({estimate['low']:,.0f} to {estimate['high']:,.0f}; "
    assert f"samples to the target: {estimate['samples']:,.0f} {spread}" in capsys.readouterr().out
    assert main([*words, "--samples", "1e5"]) == 0
    assert "samples to the target: 100,000 (given)" in capsys.readouterr().out


def test_every_technique_is_exchanged(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    found = answer(capsys, *words, "--ablation")
    rows = {(row["technique"], row["setting"]): row for row in found["ablation"]}
    asked = [row for row in rows.values() if row["is_as_asked"]]
    assert {row["technique"] for row in asked} == {"lengths", "clip", "capture", "optimizer shards"}
    assert all(row["step_ms"] == pytest.approx(found["step_ms"]) for row in asked)
    settings = {setting for technique, setting in rows if technique == "clip"}
    assert settings == {"whole", "bucket", "after"}
    random = rows["lengths", "random"]
    assert random["difference_ms"] == pytest.approx(random["step_ms"] - found["step_ms"])
    assert random["difference_ms"] > 0 and rows["capture", "off"]["difference_ms"] > 0


def test_all_sizes_that_the_samples_serve(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    found = answer(capsys, *words, "--sweep")
    sizes = [row["accelerators"] for row in found["sweep"]]
    assert sizes[:4] == [4, 8, 16, 32] and sizes == sorted(sizes)
    assert all(row["global_batch_size"] == 4 * row["accelerators"] for row in found["sweep"])
    kept = answer(capsys, *words, "--sweep", "global")["sweep"]
    assert {row["global_batch_size"] for row in kept} == {32}


def test_sizes_that_cannot_be_dealt_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main([*words, "--sweep", "global"]) == 0
    text = capsys.readouterr().out
    # 32 sequences serve 1, 2, 4 and 8 nodes of 4.
    assert "left out, as their ranks cannot be dealt the batch: 16, 32, 64" in text
    assert "25,000 nodes" in text


def test_a_sweep_without_any_size_is_refused_before_it_is_drawn(
    capsys: pytest.CaptureFixture[str], histogram: Path, tmp_path: Path
) -> None:
    # 12 sequences fit the strata; no power of two nodes of 4 does, one sequence a rank.
    picture = tmp_path / "sweep.png"
    sizes = ("--nodes", "3", "--gpus-per-node", "4", "--local-batch-size", "1", "--draws", "1")
    options = ("--sampler", "strata_4_2_2_4", "--sweep-plot", str(picture))
    words = ("plan", "cluster", *sizes, *options, "--histogram", str(histogram))
    assert main(list(words)) == 2
    output = capsys.readouterr()
    assert output.out == "" and "--sweep: no size of 1 node" in output.err
    assert not picture.exists()


def test_sizes_end_at_a_hundred_thousand() -> None:
    assert sweep_nodes(8)[0] == 1 and 128 in sweep_nodes(8)
    assert sweep_nodes(8)[-1] * 8 == 100_000
    assert sweep_nodes(200_000) == [1]


def test_pictures_are_drawn(
    capsys: pytest.CaptureFixture[str], words: list[str], tmp_path: Path
) -> None:
    names = {f"--{name}": tmp_path / f"{name}.png" for name in ("timeline", "sweep-plot")}
    names["--ablation-plot"] = tmp_path / "ablation.png"
    options = [str(word) for pair in names.items() for word in pair]
    assert main([*words, *options]) == 0
    assert all(path.read_bytes().startswith(PNG) for path in names.values())
    text = capsys.readouterr().out
    assert "one exchanged for another" in text and "to target" in text
    assert "A simulation, not a measurement" in text


def test_a_published_program_is_simulated_too(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    eager = answer(capsys, *words, "--program", "samsung_v2_0", "--recipe", "open_adam")
    captured = answer(
        capsys, *words, "--program", "samsung_v2_0", "--recipe", "open_adam", "--capture", "on"
    )
    assert captured["step_ms"] < eager["step_ms"]
    assert not eager["samples_to_target"]["in_range"]
