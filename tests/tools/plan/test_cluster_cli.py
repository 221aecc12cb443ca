"""`mlperf_bert plan cluster`, and docs/cluster_model.md, whose numbers are its."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bert_tools.plan.cluster.machine import constant_rows
from bert_tools.plan.cluster.simulation import sweep_nodes
from plan_cases import Asked
from support import REPOSITORY, load_study

SIZES = "cluster --nodes 2 --gpus-per-node 4 --local-batch-size 4 --draws 2 --histogram"
PNG = b"\x89PNG\r\n"
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


@pytest.fixture
def simulated(asked: Asked, histogram: Path) -> Asked:
    return partial(asked, SIZES, histogram)


def test_the_parts_are_the_step_and_the_steps_the_run(simulated: Asked) -> None:
    found = simulated("--samples 1e5 --start-up-s 3 --skipped-steps 2")
    assert found["kind"] == "simulation"
    assert found["global_batch_size"] == 32 and found["world_size"] == 8
    assert sum(found["parts_ms"].values()) == pytest.approx(found["step_ms"])
    run = found["run"]
    assert run["steps"] == 3125 and run["skipped_steps"] == 2
    seconds = 3 + (3127 * run["step_ms"] + run["evaluations"] * run["evaluation_ms"]) / 1e3
    assert run["seconds"] == pytest.approx(seconds)
    assert found["ablation"] == [] and found["sweep"] == [] and found["timeline"] is None


def test_samples_are_told_with_their_range(
    simulated: Asked, told: Callable[..., str], histogram: Path
) -> None:
    estimate = simulated()["samples_to_target"]
    assert estimate["low"] < estimate["samples"]
    spread = f"({estimate['low']:,.0f} to {estimate['high']:,.0f}; "
    said = f"samples to the target: {estimate['samples']:,.0f} {spread}"
    assert said in told(SIZES, histogram)
    given = told(SIZES, histogram, "--samples 1e5")
    assert "samples to the target: 100,000 (given)" in given


def test_every_technique_is_exchanged(simulated: Asked) -> None:
    found = simulated("--ablation")
    rows = {(row["technique"], row["setting"]): row for row in found["ablation"]}
    as_asked = [row for row in rows.values() if row["is_as_asked"]]
    assert {row["technique"] for row in as_asked} == {
        *("lengths", "clip", "capture", "optimizer shards")
    }
    assert all(row["step_ms"] == pytest.approx(found["step_ms"]) for row in as_asked)
    settings = {setting for technique, setting in rows if technique == "clip"}
    assert settings == {"whole", "bucket", "after"}
    random = rows["lengths", "random"]
    assert random["difference_ms"] == pytest.approx(random["step_ms"] - found["step_ms"])
    assert random["difference_ms"] > 0 and rows["capture", "off"]["difference_ms"] > 0


def test_all_sizes_that_the_samples_serve(
    simulated: Asked, told: Callable[..., str], histogram: Path
) -> None:
    found = simulated("--sweep")["sweep"]
    sizes = [row["accelerators"] for row in found]
    assert sizes[:4] == [4, 8, 16, 32] and sizes == sorted(sizes)
    assert all(row["global_batch_size"] == 4 * row["accelerators"] for row in found)
    kept = simulated("--sweep global")["sweep"]
    assert {row["global_batch_size"] for row in kept} == {32}
    text = told(SIZES, histogram, "--sweep global")
    # 32 sequences serve 1, 2, 4 and 8 nodes of 4.
    assert "left out, as their ranks cannot be dealt the batch: 16, 32, 64" in text
    assert "25,000 nodes" in text
    assert sweep_nodes(8)[0] == 1 and 128 in sweep_nodes(8)
    assert sweep_nodes(8)[-1] * 8 == 100_000 and sweep_nodes(200_000) == [1]


def test_a_sweep_without_any_size_is_refused_before_it_is_drawn(
    told: Callable[..., str], histogram: Path
) -> None:
    # 12 sequences fit the strata; no power of two nodes of 4 does, one sequence a rank.
    words = "cluster --nodes 3 --gpus-per-node 4 --local-batch-size 1 --draws 1 --histogram"
    options = "--sampler strata_4_2_2_4 --sweep-plot sweep.png"
    assert "--sweep: no size of 1 node" in told(words, histogram, options, status=2)
    assert not Path("sweep.png").exists()


def test_pictures_are_drawn(told: Callable[..., str], histogram: Path) -> None:
    names = ("timeline", "sweep-plot", "ablation-plot")
    text = told(SIZES, histogram, *(f"--{name} {name}.png" for name in names))
    assert all(Path(f"{name}.png").read_bytes().startswith(PNG) for name in names)
    assert "one exchanged for another" in text and "to target" in text
    assert "A simulation, not a measurement" in text


def test_a_published_program_is_simulated_too(simulated: Asked) -> None:
    eager = simulated("--program samsung_v2_0 --recipe open_adam")
    captured = simulated("--program samsung_v2_0 --recipe open_adam --capture on")
    assert captured["step_ms"] < eager["step_ms"]
    assert not eager["samples_to_target"]["in_range"]


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


def test_what_techniques_buy_is_what_is_simulated(asked: Asked) -> None:
    words = "cluster --nodes 128 --gpus-per-node 8 --local-batch-size 16 --recipe open_adam"
    words += " --sampler strata_6_3_2_5 --balance presort_local --start-up-s 2.15 --ablation"
    found = asked(words)
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
