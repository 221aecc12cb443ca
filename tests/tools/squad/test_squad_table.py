"""The comparison in words and pictures: what is marked, what is said, numbers with intervals."""

import io
import re
from pathlib import Path
from typing import Any

import pytest

from bert_tools.common.figures import png
from bert_tools.common.tables import markdown
from bert_tools.squad.comparison import (
    Comparison,
    Conditions,
    RunRecord,
    Value,
    compare_runs,
    read_run,
)
from bert_tools.squad.plot import goodput_figure, timeline_figure
from bert_tools.squad.table import MARK, in_words, published_study, with_interval
from squad_records import pipeline_timeline, record, write_record

BASELINE, TWO, FOUR = published_study()


def make_runs(directory: Path, **changes: Any) -> list[RunRecord]:
    """Two seeds of one rank, of two stages, and of four on two cores."""
    runs = []
    for engine, ranks in (("single", 1), ("pipeline:2", 2), ("pipeline:4", 4)):
        schedule = {} if ranks == 1 else {"schedule": "1f1b"}
        bubble = {"bubble": {"measured": 0.3, "formula": 0.25}} if ranks > 1 else {}
        timeline = {"timeline": pipeline_timeline(ranks, 4)} if ranks > 1 else {}
        for seed in (1, 2):
            rate = {"samples_per_s": {"train": 8.0 * ranks + seed, "end_to_end": 6.0}}
            found = record(
                engine, seed=seed, ranks=ranks, **(schedule | bubble | timeline | rate | changes)
            )
            runs.append(read_run(write_record(directory / f"{engine}{seed}", found)))
    return runs


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return compare_runs(make_runs(tmp_path), Conditions(initial_batch=16))


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
    runs = [
        *make_runs(tmp_path / "a")[:2],
        read_run(
            write_record(tmp_path / "b", record("ddp:2", ranks=2, validation_loss=2.5 + 1e-07))
        ),
    ]
    text = in_words(compare_runs(runs, Conditions(initial_batch=16)))
    assert "< 0.001 %" in text


def test_it_says_that_equal_batches_are_equally_efficient_but_not_of_a_sweep(
    tmp_path: Path, comparison: Comparison
) -> None:
    assert "so it is 1 for each, whatever the noise" in in_words(comparison)
    small = make_runs(tmp_path / "a", noise_scale=10.0)
    settings = record()["settings"] | {"global_batch": 32}
    large = make_runs(tmp_path / "b", noise_scale=10.0, settings=settings, updates=5)
    text = in_words(compare_runs(small + large, Conditions(initial_batch=16)))
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
        text = in_words(compare_runs(runs, Conditions(initial_batch=16)))
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
    figure = goodput_figure(compare_runs(runs, Conditions(initial_batch=16)))
    assert png(figure).startswith(b"\x89PNG")


def test_goodput_is_rate_times_efficiency_in_every_row() -> None:
    # 37.98 * 0.01627 = 0.61793; 70.40 * 7.07e-5 = 0.0049773; 116.27 * 1.116e-4 = 0.012976
    products = [row["samples_per_s_times_efficiency"] for row in (BASELINE, TWO, FOUR)]
    assert products == pytest.approx([0.61793, 0.0049773, 0.012976], rel=1e-4)
    for row in (BASELINE, TWO, FOUR):
        assert row["goodput"] == pytest.approx(
            row["samples_per_s_times_efficiency"], rel=0.02
        )  # as far as it is rounded


def test_samples_and_samples_per_update() -> None:
    # 37.98 * 3688 = 140,070; 70.40 * 3148 = 221,619; 116.27 * 1930.19 = 224,423
    assert [round(row["samples"]) for row in (BASELINE, TWO, FOUR)] == [140_070, 221_619, 224_423]
    # by 5,430, 6,735 and 3,340 updates
    per_update = [row["samples_per_update"] for row in (BASELINE, TWO, FOUR)]
    assert per_update == pytest.approx([25.80, 32.91, 67.19], abs=0.01)


def test_no_published_efficiency_follows_from_the_definition() -> None:
    # (phi + M0) / (phi + M) rises with phi and with M0: at phi = 0, M0 = 1 it is 1 / M.
    for row in (BASELINE, TWO, FOUR):
        for noise in (0.0, 1.0, 1e3):
            for initial in range(1, row["global_batch"] + 1):
                allowed = (noise + initial) / (noise + row["global_batch"])
                assert allowed >= row["least_efficiency_by_definition"] > row["efficiency"]


def test_the_study_stands_beside_it(comparison: Comparison) -> None:
    text = in_words(comparison)
    for published in ("-14.64 %", "+85.36 %", "-47.66 %", "+206.13 %", "37.98", "as published"):
        assert published in text
    assert "25.8 / 32.9 / 67.2" in text
    assert "140k / 222k / 224k" in text
    # Scale M * M0 = 16 * 16, 32 * 16, 64 * 16: at least 1/256, 1/512, 1/1024.
    assert "0.0039 / 0.002 / 0.00098" in text
    assert BASELINE["efficiency"] > 1 / 256 and TWO["efficiency"] < 1 / 512
    assert FOUR["efficiency"] < 1 / 1024
    assert "conjecture" in text
