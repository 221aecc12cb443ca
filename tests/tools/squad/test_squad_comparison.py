"""Records of runs are read strictly; comparisons: means, intervals, differences seed by seed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from squad_records import pipeline_timeline, record, write_record

from bert_tools.squad.bubble import Span
from bert_tools.squad.comparison import (
    RESULT,
    Comparison,
    Conditions,
    Row,
    RunRecord,
    compare_runs,
    read_run,
)
from mlperf_bert.common.errors import ConfigError, DataError

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


def test_mean_and_interval_over_seeds_by_hand(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, seed=seed, **rates(7.0 + seed)) for seed in (1, 2, 3)]
    value = compare_runs(runs, M0).rows[0].values["samples_per_s"]
    assert value is not None
    # 8, 9, 10: standard deviation 1, t of 2 degrees of freedom 4.302653.
    assert (value.mean, value.count) == (9.0, 3)
    assert value.half_width == pytest.approx(4.302653 / math.sqrt(3))


def test_differences_are_taken_seed_by_seed(tmp_path: Path) -> None:
    # Twice and three times the first engine's rate of the same seed: +100 % and +200 %. Of the
    # means it would be (20 + 60) / 30 - 1 = +166.7 %.
    runs = [run_of(tmp_path, seed=1, **rates(10.0)), run_of(tmp_path, seed=2, **rates(20.0))]
    runs += [
        run_of(tmp_path, "ddp:2", ranks=2, seed=1, **rates(20.0)),
        run_of(tmp_path, "ddp:2", ranks=2, seed=2, **rates(60.0)),
    ]
    comparison = compare_runs(runs, M0)
    difference = row_of(comparison, "ddp:2").differences["samples_per_s"]
    assert difference is not None
    assert difference.mean == pytest.approx(150.0)
    assert row_of(comparison, "single").differences["samples_per_s"] is None


def test_a_seed_without_its_pair_counts_in_means_alone(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, seed=1, **rates(10.0))]
    runs += [
        run_of(tmp_path, "ddp:2", ranks=2, seed=seed, **rates(rate))
        for seed, rate in ((1, 15.0), (2, 99.0))
    ]
    row = row_of(compare_runs(runs, M0), "ddp:2")
    difference = row.differences["samples_per_s"]
    assert difference is not None and difference.count == 1
    assert difference.mean == pytest.approx(50.0)
    assert row.seeds == (1, 2)


def test_efficiency_of_the_initial_batch_is_one_whatever_the_noise(tmp_path: Path) -> None:
    for noise in (None, 0.0, 1.0, 1e6):
        runs = [run_of(tmp_path, noise_scale=noise)]
        row = compare_runs(runs, M0).rows[0]
        efficiency, goodput = row.values["efficiency"], row.values["goodput"]
        assert efficiency is not None and efficiency.mean == 1.0
        assert goodput is not None and goodput.mean == 8.0  # the rate itself


def test_efficiency_and_goodput_of_a_larger_batch_by_hand(tmp_path: Path) -> None:
    # phi = 48: (48 + 16) / (48 + 64) = 4/7; at 8 samples/s goodput 32/7.
    runs = [run_of(tmp_path, noise_scale=48.0)]
    runs.append(run_of(tmp_path, noise_scale=48.0, updates=5, **with_batch(64)))
    comparison = compare_runs(runs, M0)
    row = row_of(comparison, "single, batch 64")
    efficiency, goodput = row.values["efficiency"], row.values["goodput"]
    assert efficiency is not None and efficiency.mean == pytest.approx(4 / 7)
    assert goodput is not None and goodput.mean == pytest.approx(32 / 7)


def test_unknown_noise_leaves_a_larger_batch_without_efficiency(tmp_path: Path) -> None:
    runs = [run_of(tmp_path), run_of(tmp_path, updates=5, **with_batch(32))]
    row = row_of(compare_runs(runs, M0), "single, batch 32")
    assert row.values["efficiency"] is None
    assert row.values["goodput"] is None


def test_times_of_more_ranks_than_cores_have_no_difference(tmp_path: Path) -> None:
    runs = [run_of(tmp_path), run_of(tmp_path, "pipeline:4", ranks=4, schedule="1f1b")]
    comparison = compare_runs(runs, M0)
    row = row_of(comparison, "pipeline:4")
    assert not row.is_comparable
    assert row.differences["samples_per_s"] is None
    assert row.differences["goodput"] is None
    loss = row.differences["validation_loss"]
    assert loss is not None and loss.mean == 0.0
    engine = comparison.as_json()["engines"][1]
    assert engine["comparable"] is False
    assert "more ranks than cores" in engine["why"]
    json.dumps(comparison.as_json(), allow_nan=False)


def test_nothing_compares_with_a_first_engine_that_is_not_comparable(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, "ddp:4", ranks=4), run_of(tmp_path)]
    row = row_of(compare_runs(runs, M0), "single")
    assert row.is_comparable
    assert row.differences["runtime_s"] is None


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


def test_mfu_is_of_the_whole_machine_on_cpus_and_of_all_devices_on_gpus(tmp_path: Path) -> None:
    conditions = Conditions(initial_batch=16, peak_tflops=0.1)
    # 8 GFLOP/s of 100 GFLOP/s; of two GPUs of 100 each.
    cpu = compare_runs([run_of(tmp_path, "ddp:2", ranks=2)], conditions).rows[0].values["mfu"]
    gpu_run = run_of(tmp_path, "ddp:2", ranks=2, device="cuda")
    gpu = compare_runs([gpu_run], conditions).rows[0].values["mfu"]
    assert cpu is not None and cpu.mean == pytest.approx(8.0)
    assert gpu is not None and gpu.mean == pytest.approx(4.0)


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


def test_the_same_seed_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two runs with seed 1"):
        compare_runs([run_of(tmp_path), run_of(tmp_path)], M0)


def test_no_run_is_no_comparison() -> None:
    with pytest.raises(ConfigError):
        compare_runs([], M0)


def test_a_record_is_read(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "schedule": "gpipe",
        "device_utilisation": [0.5, 0.7],
        "peak_memory_bytes": [5, 9],
        "bubble": {"measured": 0.21, "formula": 0.2},
        "timeline": pipeline_timeline(2, 4),
        "noise_scale": 31.0,
    }
    run = read_run(write_record(tmp_path, record("pipeline:2", ranks=2, seed=3, **changes)))
    assert (run.engine, run.schedule, run.ranks, run.seed) == ("pipeline:2", "gpipe", 2, 3)
    assert run.utilisation == pytest.approx(0.6)
    assert run.peak_memory_bytes == 9
    assert (run.bubble_measured, run.bubble_formula) == (0.21, 0.2)
    assert run.timeline[0] == Span(rank=0, stage=0, kind="F", microbatch=0, begin_s=0.0, end_s=1.0)
    assert run.noise_scale == 31.0
    assert run.losses[:2] == (3.0, 2.9)


@pytest.mark.parametrize(("ranks", "is_comparable"), [(1, True), (2, True), (4, False)])
def test_more_ranks_than_cores_are_not_comparable(
    tmp_path: Path, ranks: int, is_comparable: bool
) -> None:
    run = read_run(write_record(tmp_path, record(f"ddp:{ranks}", ranks=ranks)))
    assert run.is_comparable is is_comparable


def test_on_gpus_each_rank_has_its_own(tmp_path: Path) -> None:
    found = record("ddp:8", ranks=8, device="cuda", cores=2)
    assert read_run(write_record(tmp_path, found)).is_comparable


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


@pytest.mark.parametrize("key", sorted(record().keys() - {"schedule", "mfu"}))
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
