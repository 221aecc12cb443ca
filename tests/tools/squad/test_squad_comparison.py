"""Records of runs are read strictly; comparisons: means, intervals, differences seed by seed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bert_tools.squad.bubble import Span
from bert_tools.squad.comparison import (
    RESULT,
    Comparison,
    Conditions,
    Row,
    RunRecord,
    Value,
    compare_runs,
    read_run,
)
from mlperf_bert.common.errors import ConfigError, DataError
from squad_records import pipeline_timeline, record, write_record

M0 = Conditions(initial_batch=16)


def run_of(directory: Path, engine: str = "single", **changes: Any) -> RunRecord:
    name = f"{len(list(directory.iterdir()))}"
    return read_run(write_record(directory / name, record(engine, **changes)))


def with_batch(batch: int) -> dict[str, Any]:
    return {"settings": record()["settings"] | {"global_batch": batch}}


def rates(value: float) -> dict[str, Any]:
    return {"samples_per_s": {"train": value, "end_to_end": value / 2}}


def row_of(comparison: Comparison, label: str) -> Row:
    (row,) = (row for row in comparison.rows if row.label == label)
    return row


def mean(comparison: Comparison, label: str, key: str, what: str = "values") -> float | None:
    """Of a measure, or of its difference."""
    found: Value | None = getattr(row_of(comparison, label), what)[key]
    return None if found is None else found.mean


def test_mean_and_interval_over_seeds_by_hand(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, seed=seed, **rates(7.0 + seed)) for seed in (1, 2, 3)]
    # 8, 9, 10: standard deviation 1, t of 2 degrees of freedom 4.302653.
    half = pytest.approx(4.302653 / math.sqrt(3))
    found = compare_runs(runs, M0).rows[0].values["samples_per_s"]
    assert found is not None and (found.mean, found.half_width, found.count) == (9.0, half, 3)


def test_differences_are_taken_seed_by_seed(tmp_path: Path) -> None:
    # Twice and three times the first engine's rate of the same seed: +100 % and +200 %. Of the
    # means it would be (20 + 60) / 30 - 1 = +166.7 %. A third seed counts in means alone.
    runs = [run_of(tmp_path, seed=seed, **rates(10.0 * seed)) for seed in (1, 2)]
    for seed, rate in ((1, 20.0), (2, 60.0), (3, 99.0)):
        runs.append(run_of(tmp_path, "ddp:2", ranks=2, seed=seed, **rates(rate)))
    comparison = compare_runs(runs, M0)
    row = row_of(comparison, "ddp:2")
    assert mean(comparison, "ddp:2", "samples_per_s", "differences") == pytest.approx(150.0)
    difference, value = row.differences["samples_per_s"], row.values["samples_per_s"]
    assert difference is not None and value is not None
    assert (difference.count, value.count, row.seeds) == (2, 3, (1, 2, 3))
    assert mean(comparison, "single", "samples_per_s", "differences") is None


@pytest.mark.parametrize("noise", [None, 0.0, 48.0, 1e6])
def test_efficiency_and_goodput_by_hand(tmp_path: Path, noise: float | None) -> None:
    runs = [run_of(tmp_path, noise_scale=noise)]
    runs.append(run_of(tmp_path, noise_scale=noise, updates=5, **with_batch(64)))
    comparison = compare_runs(runs, M0)
    small, large = "single, batch 16", "single, batch 64"
    # Of the initial batch 1 whatever the noise, and goodput the rate itself.
    assert mean(comparison, small, "efficiency") == 1.0
    assert mean(comparison, small, "goodput") == 8.0
    if noise is None:
        assert mean(comparison, large, "efficiency") is mean(comparison, large, "goodput") is None
        return
    # phi = 48: (48 + 16) / (48 + 64) = 4/7; at 8 samples/s goodput 32/7.
    expected = 4 / 7 if noise == 48 else (noise + 16) / (noise + 64)
    assert mean(comparison, large, "efficiency") == pytest.approx(expected)
    assert mean(comparison, large, "goodput") == pytest.approx(8 * expected)


def test_times_of_more_ranks_than_cores_have_no_difference(tmp_path: Path) -> None:
    runs = [run_of(tmp_path), run_of(tmp_path, "pipeline:4", ranks=4, schedule="1f1b")]
    comparison = compare_runs(runs, M0)
    assert not row_of(comparison, "pipeline:4").is_comparable
    for key, difference in (("samples_per_s", None), ("goodput", None), ("validation_loss", 0.0)):
        assert mean(comparison, "pipeline:4", key, "differences") == difference
    engine = comparison.as_json()["engines"][1]
    assert engine["comparable"] is False
    assert "more ranks than cores" in engine["why"]
    json.dumps(comparison.as_json(), allow_nan=False)
    # Nor does anything compare with a first engine that is not comparable.
    comparison = compare_runs(runs[::-1], M0)
    assert row_of(comparison, "single").is_comparable
    assert mean(comparison, "single", "runtime_s", "differences") is None


def test_largest_difference_of_a_loss(tmp_path: Path) -> None:
    losses = record()["losses"]
    other = [*losses[:4], losses[4] + 0.25, *losses[5:]]
    runs = [run_of(tmp_path), run_of(tmp_path, "ddp:2", ranks=2, losses=other)]
    row = row_of(compare_runs(runs, M0), "ddp:2")
    assert row.loss_difference == pytest.approx(0.25)


def test_schedules_are_engines_of_their_own(tmp_path: Path) -> None:
    runs = [
        run_of(tmp_path, "pipeline:2", ranks=2, schedule=schedule) for schedule in ("1f1b", "gpipe")
    ]
    assert [row.label for row in compare_runs(runs, M0).rows] == ["pipeline:2", "pipeline:2@gpipe"]


@pytest.mark.parametrize(("device", "mfu"), [("cpu", 8.0), ("cuda", 4.0)])
def test_mfu_is_of_all_cores_or_of_all_gpus(tmp_path: Path, device: str, mfu: float) -> None:
    # 8 GFLOP/s of 100 GFLOP/s; of two GPUs of 100 each.
    runs = [run_of(tmp_path, "ddp:2", ranks=2, device=device)]
    comparison = compare_runs(runs, Conditions(initial_batch=16, peak_tflops=0.1))
    assert mean(comparison, "ddp:2", "mfu") == pytest.approx(mfu)


@pytest.mark.parametrize(
    "changes",
    [
        {"processor": "another"},
        {"device": "cuda"},
        {"precision": "bf16"},
        {"samples": 320},
        {"init": "abc"},
        {"data": record()["data"] | {"train_sha256": "other"}},
        {"model": record()["model"] | {"layers": 12}},
        {"settings": record()["settings"] | {"dropout": 0.1}},
    ],
)
def test_runs_that_differ_in_more_than_the_engine_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    runs = [run_of(tmp_path), run_of(tmp_path, "ddp:2", ranks=2, **changes)]
    with pytest.raises(DataError):
        compare_runs(runs, M0)


def test_the_same_seed_twice_or_no_run_is_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two runs with seed 1"):
        compare_runs([run_of(tmp_path), run_of(tmp_path)], M0)
    with pytest.raises(ConfigError):
        compare_runs([], M0)


def test_a_record_is_read(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "schedule": "gpipe",
        "device_utilisation": [0.5, 0.7],
        "peak_memory_bytes": [5, 9 * 2**20],
        "bubble": {"measured": 0.21, "formula": 0.2},
        "timeline": pipeline_timeline(2, 4),
        "noise_scale": 31.0,
    }
    run = read_run(write_record(tmp_path, record("pipeline:2", ranks=2, seed=3, **changes)))
    assert (run.engine, run.schedule, run.ranks, run.seed) == ("pipeline:2", "gpipe", 2, 3)
    expected = {"utilisation": 60, "memory_mib": 9, "bubble_measured": 21, "bubble_formula": 20}
    for key, value in (expected | {"noise_scale": 31.0}).items():
        assert run.values[key] == pytest.approx(value)
    assert run.timeline[0] == Span(rank=0, stage=0, kind="F", microbatch=0, begin_s=0.0, end_s=1.0)
    assert run.losses[:2] == (3.0, 2.9)


def test_more_ranks_than_cores_are_not_comparable(tmp_path: Path) -> None:
    for ranks, device, is_comparable in (
        (1, "cpu", True),
        (2, "cpu", True),
        (4, "cpu", False),
        (8, "cuda", True),  # each has its own
    ):
        assert run_of(tmp_path, ranks=ranks, device=device).is_comparable is is_comparable


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema_version", 2),
        ("engine", 7),
        ("ranks", 0),
        ("ranks", 10**9),
        ("losses", ["much"]),
        ("seconds", {"train": 0.0, "end_to_end": 1.0}),
        ("seconds", {"train": 10**400, "end_to_end": 1.0}),
        ("samples_per_s", [1.0]),
        ("noise_scale", -1.0),
        ("device_utilisation", "high"),
        ("model", {"layers": [1]}),
        ("timeline", [{"rank": 0}]),
        ("timeline", [pipeline_timeline(1, 1)[0] | {"end_s": -1.0}]),
        ("timeline", [pipeline_timeline(1, 1)[0] | {"kind": "G"}]),
        ("bubble", {"measured": "a lot"}),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(DataError) as refused:
        read_run(write_record(tmp_path, record() | {key: value}))
    assert RESULT in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", sorted(record().keys() - {"schedule"}))
def test_a_record_without_one_of_its_keys_never_raises_anything_else(
    tmp_path: Path, key: str
) -> None:
    found = record()
    del found[key]
    try:
        run = read_run(write_record(tmp_path, found))
    except DataError as refused:
        assert key in str(refused)
    else:  # a key that comparisons do not need
        assert run.engine == "single"


def test_a_run_that_has_not_ended_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has not ended"):
        read_run(tmp_path)
