"""Records of runs; comparisons by hand, in numbers, words and a picture."""

import io
import json
import math

import pytest

from bert_tools.common.results import markdown
from bert_tools.squad.compare import timeline_figure
from bert_tools.squad.comparison import (
    MARK,
    RESULT,
    compare_runs,
    in_words,
    is_comparable,
    read_run,
    with_interval,
)
from mlperf_bert.errors import ConfigError, DataError
from squad_cases import record, write_record

M0 = 16


def run_of(directory, engine="single", **changes):
    name = f"{len(list(directory.glob('*')))}"
    return read_run(write_record(directory / name, record(engine, **changes)))


def with_batch(batch):
    return {"settings": record()["settings"] | {"global_batch": batch}}


def rates(value):
    return {"samples_per_s": value}


def row_of(comparison, engine, batch=16):
    """What a comparison says of an engine."""
    rows = {(row["engine"], row["global_batch"]): row for row in comparison["engines"]}
    return rows[engine, batch]


def mean(comparison, engine, key, batch=16):
    """The mean of a measure."""
    found = row_of(comparison, engine, batch)["values"][key]
    return None if found is None else float(found["mean"])


def test_mean_and_interval_over_seeds_by_hand(tmp_path):
    runs = [run_of(tmp_path, seed=seed, **rates(7.0 + seed)) for seed in (1, 2, 3)]
    # 8, 9, 10: standard deviation 1, t of 2 degrees of freedom 4.302653.
    half = pytest.approx(4.302653 / math.sqrt(3))
    found = row_of(compare_runs(runs, M0), "single")["values"]["samples_per_s"]
    assert found == {"mean": 9.0, "half_width": half, "count": 3}


def test_ratios_are_taken_seed_by_seed_and_differences_at_any_update(tmp_path):
    # Twice and three times the first engine's rate of the same seed. Of the means it would be
    # (20 + 60) / 30 = 2.67. A third seed counts in means alone.
    losses = record()["losses"]
    other = {"losses": [*losses[:4], losses[4] + 0.25, *losses[5:]]}
    runs = [run_of(tmp_path, seed=seed, **rates(10.0 * seed)) for seed in (1, 2)]
    for seed, rate in ((1, 20.0), (2, 60.0), (3, 99.0)):
        runs.append(run_of(tmp_path, "ddp:2", ranks=2, seed=seed, **rates(rate), **other))
    comparison = compare_runs(runs, M0)
    row = row_of(comparison, "ddp:2")
    assert row["over_first"]["mean"] == pytest.approx(2.5)
    assert (row["over_first"]["count"], row["values"]["samples_per_s"]["count"]) == (2, 3)
    assert row["seeds"] == [1, 2, 3] and row["loss_difference"] == pytest.approx(0.25)
    assert row_of(comparison, "single")["over_first"] is None


def test_efficiency_and_goodput_by_hand(tmp_path):
    # phi = 48: (48 + 16) / (48 + 64) = 4/7; at 8 samples/s goodput 32/7.
    for noise, expected in ((None, [None, None]), (48.0, pytest.approx([4 / 7, 32 / 7]))):
        runs = [run_of(tmp_path, noise_scale=noise)]
        runs.append(run_of(tmp_path, noise_scale=noise, updates=5, **with_batch(64)))
        comparison = compare_runs(runs, M0)
        # Of the initial batch 1 whatever the noise, and goodput the rate itself.
        assert mean(comparison, "single", "efficiency") == 1.0
        assert mean(comparison, "single", "goodput") == 8.0
        large = [mean(comparison, "single", key, batch=64) for key in ("efficiency", "goodput")]
        assert large == expected


def test_a_mean_is_over_all_seeds_or_there_is_none(tmp_path):
    """Otherwise goodput could be that of one seed beside the samples/s of two."""
    batch = {"updates": 5, **with_batch(64)}
    runs = [run_of(tmp_path), run_of(tmp_path, seed=2)]
    runs.append(run_of(tmp_path, noise_scale=48.0, **rates(200.0), **batch))
    runs.append(run_of(tmp_path, seed=2, **rates(100.0), **batch))
    comparison = compare_runs(runs, M0)
    assert mean(comparison, "single", "samples_per_s", batch=64) == 150.0
    for key in ("noise_scale", "efficiency", "goodput"):
        assert mean(comparison, "single", key, batch=64) is None


def test_times_of_more_ranks_than_cores_have_no_ratio(tmp_path):
    for ranks, device, comparable in ((2, "cpu", True), (4, "cpu", False), (8, "cuda", True)):
        assert is_comparable(run_of(tmp_path, ranks=ranks, device=device)) is comparable
    runs = [run_of(tmp_path), run_of(tmp_path, "pipeline:4", ranks=4)]
    comparison = compare_runs(runs, M0)
    row = row_of(comparison, "pipeline:4")
    assert row["comparable"] is False and row["over_first"] is None
    assert mean(comparison, "pipeline:4", "samples_per_s") == 8.0
    assert row["loss_difference"] == 0.0
    json.dumps(comparison, allow_nan=False)
    # Nor does anything compare with a first engine that is not comparable.
    row = row_of(compare_runs(runs[::-1], M0), "single")
    assert row["comparable"] is True and row["over_first"] is None


def test_runs_that_differ_in_more_than_the_engine_are_refused(tmp_path):
    same = record()
    others = [{"processor": "another"}, {"cores": 4}, {"device": "cuda"}]
    others += [{"samples": 320}, {"init": "abc"}]
    others += [{"settings": same["settings"] | {"precision": "bf16"}}]
    others += [{"settings": same["settings"] | {"stride": 64}}]
    others += [{"data": same["data"] | {"train_sha256": "other"}}]
    others += [{"model": same["model"] | {"layers": 12}}]
    for changes in others:
        runs = [run_of(tmp_path), run_of(tmp_path, "ddp:2", ranks=2, **changes)]
        with pytest.raises(DataError):
            compare_runs(runs, M0)


def test_what_is_no_comparison_is_refused(tmp_path):
    with pytest.raises(DataError, match="two runs with seed 1"):
        compare_runs([run_of(tmp_path), run_of(tmp_path)], M0)
    with pytest.raises(ConfigError):
        compare_runs([], M0)
    with pytest.raises(DataError, match="run is not finished"):
        read_run(tmp_path)
    with pytest.raises(DataError, match=f"{RESULT}: schema_version is 2"):
        read_run(write_record(tmp_path, record(schema_version=2)))


def make_runs(directory, **changes):
    """Two seeds of one rank, of two stages, and of four on two cores."""
    runs = []
    for engine, ranks in (("single", 1), ("pipeline:2", 2), ("pipeline:4", 4)):
        span = {"microbatch": 0, "kind": "F", "begin_s": 0.0, "end_s": 1.0}
        timeline = [{"rank": rank, "stage": rank, **span} for rank in range(ranks)]
        measured = {"bubble_measured": 30.0, "timeline": timeline} if ranks > 1 else {}
        for seed in (1, 2):
            more = measured | rates(8.0 * ranks + seed) | changes
            runs.append(run_of(directory, engine, seed=seed, ranks=ranks, **more))
    return runs


@pytest.fixture
def runs(tmp_path):
    return make_runs(tmp_path)


def test_a_mean_is_shown_with_its_interval_in_a_table_of_equally_wide_lines():
    lines = markdown(["engine", "x"], [["a | b", "1"], ["longer than that", "22"]])
    assert len({len(line) for line in lines}) == 1
    assert all(line.count("|") == 3 for line in lines)  # a bar in a cell would be a column
    for mean, half_width, text in (
        (12.3456, 0.4123, "12.35 ± 0.41"),
        (1234.56, 98.7, "1,235 ± 99"),
        (0.0, None, "0"),
        (2.5, 3e-7, "2.5 ± 3e-07"),
        (100 / 9, 5.4e-15, "11.11"),  # what rounding left
    ):
        assert with_interval({"mean": mean, "half_width": half_width, "count": 3}) == text


def test_the_table_is_made_of_the_record_alone(tmp_path, runs):
    comparison = compare_runs(runs, M0)
    text = in_words(comparison)
    assert in_words(json.loads(json.dumps(comparison))) == text
    header, _, single, pipeline, *_ = text.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (header, pipeline)]
    found = dict(zip(*cells, strict=True))
    assert found["engine"] == "pipeline:2"
    assert found["samples/s"].startswith("17.5 ±") and found["goodput, samples/s"][:4] == "17.5"
    # (17 / 9 + 18 / 10) / 2 of the seeds' rates
    assert found["relative to single"].startswith("1.84")
    assert found["bubble, %"] == "30"
    assert found["max loss difference"] == "0"
    assert "| - |" in single.replace("  ", "")
    assert "80 windows of 80 questions, seeds 1, 2." in text
    assert "so the efficiency of each is 1." in text
    large = make_runs(tmp_path / "large", updates=5, **with_batch(32))
    assert "so the efficiency of each is 1" not in in_words(compare_runs(runs + large, M0))


def test_what_is_not_comparable_is_marked(tmp_path, runs):
    text = in_words(compare_runs(runs, M0))
    marked = [line for line in text.splitlines() if MARK in line]
    assert len(marked) == 2 and marked[0].startswith(f"| pipeline:4 {MARK} ")
    assert "but their times and rates are not" in marked[1]
    assert MARK not in in_words(compare_runs(runs[:-2], M0))
    page = io.StringIO()
    timeline_figure(runs).savefig(page, format="svg")
    assert "(not comparable, 4 ranks on 2 cores)" in page.getvalue()
    assert "measured bubble 30.0%" in page.getvalue()
    assert timeline_figure(make_runs(tmp_path / "none", timeline=[])) is None
