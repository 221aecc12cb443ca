"""Records of runs read strictly; comparisons by hand, in numbers, words and pictures."""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from bert_tools.common.figures import png
from bert_tools.common.tables import markdown
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
from bert_tools.squad.plot import goodput_figure, timeline_figure
from bert_tools.squad.table import MARK, in_words, published_study, with_interval
from mlperf_bert.common.errors import ConfigError, DataError
from squad_cases import pipeline_timeline, record, write_record

M0 = Conditions(initial_batch=16)
BASELINE, TWO, FOUR = published_study()


def run_of(directory: Path, engine: str = "single", **changes: Any) -> RunRecord:
    name = f"{len(list(directory.glob('*')))}"
    return read_run(write_record(directory / name, record(engine, **changes)))


def with_batch(batch: int) -> dict[str, Any]:
    return {"settings": record()["settings"] | {"global_batch": batch}}


def rates(value: float) -> dict[str, Any]:
    return {"samples_per_s": {"train": value, "end_to_end": value / 2}}


def row_of(comparison: Comparison, label: str) -> Row:
    (row,) = (row for row in comparison.rows if row.label == label)
    return row


def mean(comparison: Comparison, label: str, key: str, what: str = "values") -> float | None:
    """The mean of a measure, or of its difference."""
    found: Value | None = getattr(row_of(comparison, label), what)[key]
    return None if found is None else found.mean


def test_mean_and_interval_over_seeds_by_hand(tmp_path: Path) -> None:
    runs = [run_of(tmp_path, seed=seed, **rates(7.0 + seed)) for seed in (1, 2, 3)]
    # 8, 9, 10: standard deviation 1, t of 2 degrees of freedom 4.302653.
    half = pytest.approx(4.302653 / math.sqrt(3))
    found = compare_runs(runs, M0).rows[0].values["samples_per_s"]
    assert found is not None and (found.mean, found.half_width, found.count) == (9.0, half, 3)


def test_runtime_and_rate_count_the_same_updates(tmp_path: Path) -> None:
    # Of a run whose first update, or those that measure, took most of the time of training.
    slow = {"seconds": record()["seconds"] | {"train": 1e6}}
    runs = [
        run_of(tmp_path, "single", **rates(10.0)),
        run_of(tmp_path, "ddp:2", **slow, **rates(20.0)),
    ]
    comparison = compare_runs(runs, M0)
    samples = record()["samples"]
    assert mean(comparison, "single", "runtime_s") == pytest.approx(samples / 10)
    assert mean(comparison, "ddp:2", "runtime_s") == pytest.approx(samples / 20)
    assert mean(comparison, "ddp:2", "runtime_s", "differences") == pytest.approx(-50)


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
    runs = [run_of(tmp_path, plain_noise_scale=noise)]
    runs.append(run_of(tmp_path, plain_noise_scale=noise, updates=5, **with_batch(64)))
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
        "plain_noise_scale": 31.0,
    }
    run = read_run(write_record(tmp_path, record("pipeline:2", ranks=2, seed=3, **changes)))
    assert (run.engine, run.schedule, run.ranks, run.seed) == ("pipeline:2", "gpipe", 2, 3)
    expected = {"utilisation": 60, "memory_mib": 9, "bubble_measured": 21, "bubble_formula": 20}
    for key, value in (expected | {"noise_scale": 31.0}).items():
        assert run.values[key] == pytest.approx(value)
    assert run.timeline[0] == Span(rank=0, stage=0, kind="F", microbatch=0, begin_s=0.0, end_s=1.0)
    assert run.losses[:2] == (3.0, 2.9)


def test_runs_that_fill_their_cores_are_comparable(tmp_path: Path) -> None:
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
        ("seconds", {"train": 1.0, "end_to_end": 0.0}),
        ("seconds", {"train": 1.0, "end_to_end": 10**400}),
        ("samples_per_s", [1.0]),
        ("plain_noise_scale", -1.0),
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


def make_runs(directory: Path, **changes: Any) -> list[RunRecord]:
    """Two seeds of one rank, of two stages, and of four on two cores."""
    runs = []
    for engine, ranks in (("single", 1), ("pipeline:2", 2), ("pipeline:4", 4)):
        schedule = {} if ranks == 1 else {"schedule": "1f1b"}
        bubble = {"bubble": {"measured": 0.3, "formula": 0.25}} if ranks > 1 else {}
        timeline = {"timeline": pipeline_timeline(ranks, 4)} if ranks > 1 else {}
        for seed in (1, 2):
            rate = {"samples_per_s": {"train": 8.0 * ranks + seed, "end_to_end": 6.0}}
            more = schedule | bubble | timeline | rate | changes
            runs.append(run_of(directory, engine, seed=seed, ranks=ranks, **more))
    return runs


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return compare_runs(make_runs(tmp_path), M0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Value(12.3456, 0.4123, 3), "12.35 ± 0.41"),
        (Value(1234.56, 98.7, 3), "1,235 ± 99"),
        (Value(1234.56, 987.6, 3), "1,235 ± 988"),
        (Value(0.5, None, 1), "0.5"),
        (Value(1.0, 0.0, 3), "1"),
        (Value(2.5, 3e-7, 3), "2.5 ± 3e-07"),
        (Value(100 / 9, 5.4e-15, 3), "11.11"),  # what rounding left
    ],
)
def test_a_mean_is_shown_as_far_as_its_interval_knows_it(value: Value, text: str) -> None:
    assert with_interval(value) == text


def test_an_engine_with_fewer_seeds_than_others_is_named(comparison: Comparison) -> None:
    assert "seeds, as" not in in_words(comparison)
    text = in_words(compare_runs(comparison.runs[:-1], comparison.conditions))
    assert "pipeline:4: 1 of 2 seeds" in text


def test_lines_of_a_table_are_equally_wide() -> None:
    lines = markdown(["engine", "x"], [["a | b", "1"], ["longer than that", "22"]])
    assert len({len(line) for line in lines}) == 1
    assert all(line.count("|") == 3 for line in lines)  # a bar in a cell would be a column


def test_what_is_not_comparable_is_marked_wherever_it_is_a_time(comparison: Comparison) -> None:
    lines = in_words(comparison).splitlines()
    marked = [line for line in lines if line.startswith("| pipeline:4")]
    assert len(marked) == 3  # the study's measures, differences, other measures
    assert all(MARK in line for line in marked)
    assert "not comparable" in marked[1]
    assert not [line for line in lines if line.startswith("| pipeline:2") and MARK in line]


def test_differences_of_rounding_are_not_written_out(tmp_path: Path) -> None:
    runs = [run_of(tmp_path), run_of(tmp_path, "ddp:2", ranks=2, validation_loss=2.5 + 1e-07)]
    assert "< 0.001 %" in in_words(compare_runs(runs, M0))


def test_it_says_that_equal_batches_are_equally_efficient_but_not_of_a_sweep(
    tmp_path: Path, comparison: Comparison
) -> None:
    assert "so it is 1 for each, whatever the noise" in in_words(comparison)
    small = make_runs(tmp_path / "a", plain_noise_scale=10.0)
    large = make_runs(tmp_path / "b", plain_noise_scale=10.0, updates=5, **with_batch(32))
    text = in_words(compare_runs(small + large, M0))
    assert "so it is 1 for each" not in text
    # (10 + 16) / (10 + 32) = 0.619
    lines = [line for line in text.splitlines() if line.startswith("| pipeline:2, batch 32  ")]
    assert ["0.619" in line for line in lines].count(True) == 1


def test_waiting_for_a_core_is_told(tmp_path: Path, comparison: Comparison) -> None:
    # 20 s of training: the first of both ranks of pipeline:2 waited 10 s, 10 / (20 * 2) of both.
    for waited, is_told in (([10.0, 0.0], True), ([0.1, 0.1], False), ([10.0, None], False)):
        runs = make_runs(tmp_path / f"{waited}")[:2]
        changes: dict[str, Any] = {"core_wait_seconds": waited}
        shared = record("pipeline:2", ranks=2, **changes)
        runs.append(read_run(write_record(tmp_path / f"shared{waited}", shared)))
        text = in_words(compare_runs(runs, M0))
        assert ("waited up to 25 % of their time for a core" in text) is is_told
    assert "for a core" not in in_words(comparison)  # records that do not say it


def as_svg(figure: Any) -> str:
    page = io.StringIO()
    figure.savefig(page, format="svg")
    return page.getvalue()


def test_pictures_mark_it_too(comparison: Comparison) -> None:
    goodput = as_svg(goodput_figure(comparison))
    assert len(re.findall(r"<!-- pipeline:4: goodput [\d.]+ \(not comparable\) -->", goodput)) == 1
    assert "<!-- pipeline:2: goodput 17.5 -->" in goodput  # mean of 17 and 18, efficiency 1
    timeline = as_svg(timeline_figure(comparison.runs))
    assert "4 ranks on 2 cores: not comparable" in timeline
    assert "30.0% measured, 25.0% by formula" in timeline


def test_without_timelines_there_is_no_picture_of_them(tmp_path: Path) -> None:
    runs = make_runs(tmp_path, timeline=[])
    assert timeline_figure(runs) is None
    figure = goodput_figure(compare_runs(runs, M0))
    assert png(figure).startswith(b"\x89PNG")


def test_what_the_published_figures_say_of_each_other() -> None:
    # 37.98 * 3688 = 140,070 samples by 5,430 updates, and 37.98 * 0.01627 = 0.61793; ...
    for row, samples, of_update, product in (
        (BASELINE, 140_070, 25.80, 0.61793),
        (TWO, 221_619, 32.91, 0.0049773),  # 70.40 * 3148, by 6,735; 70.40 * 7.07e-5
        (FOUR, 224_423, 67.19, 0.012976),  # 116.27 * 1930.19, by 3,340; 116.27 * 1.116e-4
    ):
        assert round(row["samples"]) == samples
        assert row["samples_per_update"] == pytest.approx(of_update, abs=0.01)
        assert row["samples_per_s_times_efficiency"] == pytest.approx(product, rel=1e-4)
        assert row["goodput"] == pytest.approx(product, rel=0.02)  # as far as it is rounded
        # (phi + M0) / (phi + M) rises with phi and with M0: at phi = 0, M0 = 1 it is 1 / M.
        for noise in (0.0, 1.0, 1e3):
            for initial in range(1, row["global_batch"] + 1):
                allowed = (noise + initial) / (noise + row["global_batch"])
                assert allowed >= row["least_efficiency_by_definition"]
        assert (row["efficiency"] < row["least_efficiency_by_definition"]) == (row is not BASELINE)
    assert pytest.approx(BASELINE["efficiency"], rel=1e-3) == (0.042 + 1) / (0.042 + 64)


def test_the_study_stands_beside_it(comparison: Comparison) -> None:
    text = in_words(comparison)
    for published in ("-14.64 %", "+85.36 %", "-47.66 %", "+206.13 %", "37.98", "as published"):
        assert published in text
    assert "25.8 / 32.9 / 67.2" in text
    assert "140k / 222k / 224k" in text
    # Scale M * M0 = 64 * 64, 32 * 64, 64 * 64: at least 1/4096, 1/2048, 1/4096.
    assert "0.00024 / 0.00049 / 0.00024" in text
    assert BASELINE["efficiency"] > 1 / 4096 and TWO["efficiency"] < 1 / 2048
    assert FOUR["efficiency"] < 1 / 4096
    assert "6.7454 (-92.90 %)" in text and "phi = 0.042 samples" in text
    assert "conjecture" in text
