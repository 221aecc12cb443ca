"""`bench train`: what it reports, how long it measures, and its profile with a trace."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from bench_cases import CPU, assert_held, bench, measured, tiny

from bert_tools.bench import timing
from bert_tools.bench.flops import measure_peak
from bert_tools.bench.timing import time_steps
from bert_tools.bench.train import MOST_ROWS, gaps, record, tables
from bert_tools.bench.training_run import training_run
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.run.console import ProgressLines

BRIEF = ("--steps", "5", "--seconds", "9", "--peak-seconds", "0.01")  # 4 steps, one of each update


@pytest.mark.parametrize("step_mode", ["eager", "captured"])
def test_train(step_mode, snapshot):
    settings = (f"run.step_mode={step_mode}", "parallel.grad_accum_steps=2", "model.num_layers=2")
    result, _, progress = measured("train", *BRIEF, settings=settings)
    assert_held({**result, "steps": 4}, snapshot)
    building = f"building the model on cpu (step {step_mode})"
    for line in (building, "warming up", "measuring matrix products (about 0 s)"):
        assert f"{line}\n" in progress
    assert result["steps"] == 4
    samples = 4 * 2  # of two micro-batches
    assert result["samples_per_s"] == pytest.approx(1e3 * samples / result["step_ms"])
    assert result["tokens_per_s"] / result["samples_per_s"] == pytest.approx(result["mean_length"])
    assert result["tflops"] == pytest.approx(
        result["samples_per_s"] * result["gflop_per_sequence"] / 1e3
    )
    assert result["mfu"] == pytest.approx(result["tflops"] / result["peak_tflops"])
    assert (result["padding_share"] > 0) == (step_mode == "captured")


def test_steps_behind_the_last_learning_rate_begin_again():
    config = tiny("run.max_steps=2", "optim.learning_rate=1e-3")
    with training_run(config, CPU, num_updates=1) as run:
        losses = [run(number).item() for number in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_peak_of_each_dtype(precision):
    model = ModelSection(hidden_size=32, intermediate_size=64, precision=precision)
    threads = torch.get_num_threads()
    peak, reason = measure_peak(model, 100, CPU, 0.01)
    assert torch.get_num_threads() == threads
    if reason is None:
        assert peak and peak > 0
    else:
        assert precision == "fp8" and "\n" not in reason  # a processor may have no such product


@pytest.mark.parametrize(
    ("steps", "seconds", "measured_steps"), [(5, 99, 4), (9, 23, 8), (1, 0, 4)]
)
def test_each_update_is_timed_equally_often(monkeypatch, steps, seconds, measured_steps):
    """Updates of other lengths take other times; the mean is that of all of them."""
    numbers, now, update_s = [], [0.0], (1.0, 5.0, 2.0, 2.0)

    def run(number):
        numbers.append(number)
        now[0] += update_s[number % 4]
        return torch.zeros(())

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    limits = {"steps": steps, "seconds": seconds, "progress": ProgressLines()}
    assert time_steps(run, num_updates=4, **limits) == (measured_steps, 2500.0)
    assert numbers == list(range(4 + measured_steps))


def test_gaps_are_where_nothing_runs():
    """Two streams: nothing runs in 3 .. 5 and 9 .. 10."""
    spans = [(10, 11), (0, 2), (1, 3), (5, 8), (6, 7), (8, 9)]
    assert gaps(spans) == (11, [2, 1])
    assert gaps(spans[:1]) == (1, [])


def test_tables_are_of_one_step_and_leave_out_what_operators_call():
    x = torch.ones(64, 64, requires_grad=True)

    def run():
        for _ in range(2):
            (x @ x).sum().backward()

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


def test_json_words_and_trace(tmp_path):
    trace = tmp_path / "new" / "step.json.gz"
    whole, words, _ = measured("train", *BRIEF, "--profile", "--out", trace)
    result = whole["profile"]
    assert result["unit_of_work"] == "operator"
    assert len(result["rows"]) == MOST_ROWS
    shares = [row["share"] for row in result["rows"]]
    assert shares == sorted(shares, reverse=True)
    products = [row for row in result["rows"] if row["name"] in ("aten::mm", "aten::addmm")]
    assert all(row["calls"] == int(row["calls"]) for row in products)
    assert 0 <= result["gap_share"] < 1
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert "aten::mm" in {each["name"] for each in events}
    assert all(row["name"] in words for row in result["rows"])


def test_what_cannot_be_is_told(tmp_path):
    """A trace's place before anything is built."""
    with pytest.raises(DataError, match="Not a directory; use a directory that you can write to"):
        bench("train", "--profile", "--out", Path(__file__) / "none" / "step.json.gz")
    with pytest.raises(ConfigError, match="--out: needs --profile"):
        bench("train", "--out", tmp_path / "step.json.gz")
    with pytest.raises(DataError, match="recorded no kernel"):
        tables(record(lambda: None, CPU), 1, CPU)
