"""Outputs of a run: metrics.jsonl and its contents, outcome.json, and the printed lines."""

import errno
import io
import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from mlperf_bert.config.files import load_config
from mlperf_bert.data.batch import blank
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.loader import StepBatch
from mlperf_bert.distributed.clipping import ClipOutcome
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.files import LineFile
from mlperf_bert.run import metrics as metrics_module
from mlperf_bert.run.console import Reporter
from mlperf_bert.run.metrics import Metrics, MetricsFile, StepResult
from mlperf_bert.run.outcome import REMEDY, RunOutcome, read_outcome

REACHED = RunOutcome(
    status="success", steps=120, samples=1920, seconds=3.5, mlm_accuracy=0.72, stopped_by=None
)
STOPPED = replace(REACHED, status="aborted", mlm_accuracy=None, stopped_by="SIGTERM")
SMALL = StaticShape(tokens=80, sequences=4, masked=12, max_seqlen=32, max_masked=5)
LARGE = replace(SMALL, tokens=112, masked=16)
RECORD = {
    "step": 120,
    "samples": 3840,
    "samples_per_s": 412.4,
    "tokens_per_s": 21_456.7,
    "loss": 5.12345,
    "mlm_accuracy": None,
    "learning_rate": 0.0021,
    "step_ms": 500.0,
}


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_run_makes_later_records_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in (5, 10, 15):
        first.write({"step": step, "loss": float("nan")})
    first.close()
    with pytest.raises(ConfigError, match="File exists"):  # a new run writes over nothing
        MetricsFile(path)
    with path.open("a") as file:
        file.write('{"step": 20, "lo')  # a run killed while it wrote
    second = MetricsFile(path, after_step=10)
    second.write({"step": 12, "loss": 1.0})
    second.close()
    MetricsFile(None, after_step=3).write({"step": 1})
    assert steps(path) == [5, 10, 12]
    assert json.loads(path.read_text().splitlines()[0])["loss"] is None


def test_a_damaged_line_costs_a_resumed_run_that_line_alone(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    records = [json.dumps({"step": step}) for step in range(1, 8)]
    for damage, said in (
        ({3: "x"}, "line 3: not a record of the run, so it was dropped\n"),
        ({1: "[1]", 2: '{"step": true}', 4: "\0" * 2**21}, "line 1: not a record of the run"),
        (
            {2: '{"step": 802}', 5: "x"},
            "line 2: not a record of the run, so it was dropped (and 1 ",
        ),
        ({}, ""),
    ):
        lines = [damage.get(number, line) for number, line in enumerate(records, 1)]
        path.write_text("\n".join(lines) + '\n{"step": 8, "lo')  # killed while it wrote
        MetricsFile(path, after_step=6).close()
        assert steps(path) == [step for step in range(1, 7) if step not in damage]
        errors = capsys.readouterr().err
        assert errors.count("\n") == bool(damage) and said in errors


def test_a_full_disk_costs_lines_and_one_warning(tmp_path):
    warnings = []
    path = tmp_path / "lines"
    lines = LineFile(path, warnings.append)
    lines.append("one")
    file, full = lines._file, iter([True, True])

    def write(contents):
        if next(full, False):
            file.write(contents[: len(contents) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return file.write(contents)

    lines._file = Mock(wraps=file, write=write)
    for line in ("two", "three", "four"):
        lines.append(line)
    lines.close()
    assert path.read_text() == "one\nfour\n"
    assert len(warnings) == 1 and "No space left on device" in warnings[0]


def test_the_peak_of_memory_is_in_bytes(tmp_path, monkeypatch):
    (tmp_path / "status").write_text("VmPeak:\t 4000 kB\nVmHWM:\t 3000 kB\nVmRSS:\t 2000 kB\n")
    monkeypatch.setattr(metrics_module, "_STATUS", tmp_path / "status")
    assert metrics_module.memory_bytes(torch.device("cpu")) == 3000 * 1024


def test_an_outcome_comes_back_as_it_was_written_and_another_form_is_one_line(tmp_path, snapshot):
    path = tmp_path / "outcome.json"
    with pytest.raises(DataError, match="is missing"):
        read_outcome(path)
    for outcome in (REACHED, STOPPED):
        path.write_bytes(outcome.to_json())
        assert read_outcome(path) == outcome
    assert path.read_text() == snapshot
    values = json.loads(path.read_bytes())
    path.write_bytes(REACHED.to_json()[:-20])
    with pytest.raises(DataError, match="is not valid JSON"):
        read_outcome(path)
    for changed, reason in (
        (values | {"schema_version": 2}, "schema_version is 2, but this program reads 1"),
        ({"schema_version": 1}, "has no key 'status'"),
        (values | {"status": "won"}, "status is 'won', neither success nor aborted"),
        (values | {"steps": None}, "steps is None, not a number"),
        (values | {"seconds": "long"}, "seconds is 'long', not a number"),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(DataError) as raised:
            read_outcome(path)
        assert str(raised.value) == f"{path}: {reason}; {REMEDY}"


def test_lines_are_printed_and_kept_in_a_file_but_by_other_ranks(
    tiny_config, tmp_path, capsys, snapshot
):
    log, config = tmp_path / "stdout.log", load_config(tiny_config, ["run.max_steps=8000"])
    for path in (log, None):
        with Reporter(path, config) as reporter:
            reporter.line("evaluation [bold]12[/bold]")
            reporter.progress(RECORD, None)
            reporter.progress({**RECORD, "mlm_accuracy": 0.1017}, 0.1017)
            reporter.progress({**RECORD, "samples": 7680, "mlm_accuracy": 0.2034}, 0.2034)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "evaluation [bold]12[/bold]"  # text is never taken for markup
    assert printed[1:] == snapshot
    assert [line.split(" ", 1)[1] for line in log.read_text().splitlines()] == printed


def test_what_found_no_room_is_not_kept(tiny_config, tmp_path, monkeypatch):
    disk = Mock(wraps=io.StringIO())
    disk.write.side_effect = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("sys.stdout", disk)
    with Reporter(tmp_path / "stdout.log", load_config(tiny_config)) as reporter:
        reporter.line("lost")
        disk.write.side_effect = None
        reporter.line("shown")
    assert disk.getvalue() == "shown\n"
    assert "lost" in (tmp_path / "stdout.log").read_text()


def test_capacity_waste_is_the_padding_of_the_capacities_that_were_used(tiny_config):
    config = load_config(tiny_config, ["run.step_mode=captured"])
    metrics = Metrics(config, 1, torch.device("cpu"))
    zero = torch.zeros(())
    result = StepResult(zero, ClipOutcome(zero, zero, zero, zero), zero)
    for step, (tokens, shape) in enumerate(
        [((60, 70), SMALL), ((110, 90), LARGE), ((300, 170), None)], start=1
    ):
        plan = SimpleNamespace(
            step=step,
            sample_ids=np.arange(8),
            num_tokens=np.array(tokens)[:, None],
            num_masked=np.array([[8], [9]]),
            imbalance_tokens=1.0,
        )
        batch = blank(SMALL) if shape is None else blank(shape)
        metrics.add(StepBatch(plan, (replace(batch, shape=shape),), 0.0), result)
    record = metrics.record(24, None)
    # 2 x 80 and 2 x 112 tokens of room, and a step that no capacity held: 800 real tokens in all.
    assert record["capacity_waste"] == pytest.approx((160 + 224 + 470) / 800 - 1)
    assert record["capacity_waste_masked"] == pytest.approx((24 + 32 + 17) / 51 - 1)
    assert record["eager_steps"] == 1
    metrics.add(StepBatch(plan, (replace(batch, shape=None),), 0.0), result)
    assert metrics.record(32, None)["capacity_waste"] == 0  # a new interval


def test_rates_leave_out_what_is_no_training(tiny_config, monkeypatch):
    clock = Mock(return_value=0.0)
    monkeypatch.setattr(metrics_module.time, "perf_counter", clock)
    metrics = Metrics(load_config(tiny_config), 1, torch.device("cpu"))
    zero = torch.zeros(())
    result = StepResult(zero, ClipOutcome(zero, zero, zero, zero), zero)
    plan = SimpleNamespace(
        step=1,
        sample_ids=np.arange(40),
        num_tokens=np.array([[300], [200]]),
        num_masked=np.array([[8], [9]]),
        imbalance_tokens=1.0,
    )
    metrics.add(StepBatch(plan, (replace(blank(SMALL), shape=SMALL),), 0.0), result)
    clock.return_value = 14.0  # of which an evaluation took ten
    metrics.exclude(10.0)
    assert metrics.throughput_since_evaluation() == 10.0
    record = metrics.record(40, None)
    assert (record["samples_per_s"], record["tokens_per_s"]) == (10.0, 125.0)
