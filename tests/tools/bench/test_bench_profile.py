"""`bench train --profile`: what the gaps and the table add up to, and the trace of a step."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from bench_cases import CPU, bench, measured

from bert_tools.bench.profile import MOST_ROWS, gaps, record, tables
from mlperf_bert.errors import ConfigError, DataError


def test_gaps_are_where_nothing_runs() -> None:
    """Two streams: nothing runs in 3 .. 5 and 9 .. 10."""
    spans = [(10, 11), (0, 2), (1, 3), (5, 8), (6, 7), (8, 9)]
    assert gaps(spans) == (11, [2, 1])
    assert gaps(spans[:1]) == (1, [])


def test_tables_are_of_one_step_and_leave_out_what_operators_call() -> None:
    x = torch.ones(64, 64, requires_grad=True)

    def run() -> None:
        for _ in range(2):
            (x @ x).sum().backward()  # type: ignore[no-untyped-call]

    recorded = record(run, CPU)
    table = tables(recorded, 2, CPU)
    rows = {row["name"]: row for row in table["rows"]}
    assert rows["aten::mm"]["calls"] == 3  # forward, and a gradient of each factor
    matmul = next(each for each in recorded.key_averages() if each.key == "aten::matmul")
    assert matmul.self_cpu_time_total < matmul.cpu_time_total
    own = sum(each.self_cpu_time_total for each in recorded.key_averages())
    mm = rows["aten::mm"]
    assert mm["ms"] / mm["share"] == pytest.approx(own / 1e3 / 2)
    assert table["calls"] == len(recorded.events()) / 2
    assert 0 <= table["gap_share"] < 1


def test_an_empty_record_is_told() -> None:
    with pytest.raises(DataError, match="recorded no kernel"):
        tables(record(lambda: None, CPU), 1, CPU)


def test_json_words_and_trace(tmp_path: Path) -> None:
    trace = tmp_path / "step.json.gz"
    brief = ("--steps", 3, "--seconds", 0.01, "--peak-seconds", 0.01)
    whole, words, _ = measured("train", *brief, "--profile", "--out", trace)
    result = whole["profile"]
    assert result["unit_of_work"] == "operator"
    assert len(result["rows"]) == MOST_ROWS
    shares = [row["share"] for row in result["rows"]]
    assert shares == sorted(shares, reverse=True)
    products = [row for row in result["rows"] if row["name"] in ("aten::mm", "aten::addmm")]
    assert all(row["calls"] == int(row["calls"]) for row in products)
    assert 0 <= result["gap_share"] < 1
    names = [
        each["name"] for each in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ]
    assert "aten::mm" in names
    assert all(row["name"] in words for row in result["rows"])


def test_a_trace_that_cannot_be_written_is_told_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        bench("train", "--profile", "--out", tmp_path / "none" / "step.json.gz")
    with pytest.raises(ConfigError, match="--out: is for --profile"):
        bench("train", "--out", tmp_path / "step.json.gz")
