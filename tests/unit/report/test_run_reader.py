"""Metrics, run directories and logs from outside: read as written, or one line of error."""

import json
from pathlib import Path

import pytest
from run_cases import BATCH_16K, log_line, log_of, record, write_run

from mlperf_bert.errors import UserError
from mlperf_bert.report.run import read_run
from mlperf_bert.report.run_reader import (
    MAX_LINE_BYTES,
    MAX_METRICS_BYTES,
    MAX_RECORDS,
    read_metrics,
)

GOOD = json.dumps(record(1, 16, None)).encode()


def changed(**values: object) -> bytes:
    return json.dumps({**record(1, 16, None), **values}).encode() + b"\n"


def without(key: str) -> bytes:
    kept = {name: value for name, value in record(1, 16, None).items() if name != key}
    return json.dumps(kept).encode() + b"\n"


HOSTILE = {
    "no JSON": (b"{\n", "line 1: is no record"),
    "second line": (GOOD + b"\nx\n", "line 2: is no record"),
    "an empty line": (GOOD + b"\n\n", "line 2: is no record"),
    "a list": (b"[]\n", "is not a JSON object"),
    "deep": (b"[" * 8000 + b"\n", "is nested too deeply"),
    "NaN": (changed(loss=0).replace(b'"loss": 0', b'"loss": NaN'), "NaN is not JSON"),
    "a huge number": (b'{"step": 1e999}\n', "'step' is inf, no number"),
    "many digits": (b'{"step": ' + b"9" * 5000 + b"}\n", "line 1: is no record"),
    "a text": (changed(loss="1"), "'loss' is '1', no number"),
    "an object": (changed(more={}), "'more' is a dict, no number"),
    "a flag": (changed(step=True), "'step' is True, no number"),
    "no step": (without("step"), "step is None, no count"),
    "half a step": (changed(step=0.5), "step is 0.5, no count"),
    "fewer than no samples": (changed(samples=-1), "samples is -1, no count"),
    "no loss": (without("loss"), "loss is missing"),
    "more than all right": (changed(mlm_accuracy=1.5), "mlm_accuracy is 1.5, not in 0 .. 1"),
    "a step back": (GOOD + b"\n" + GOOD + b"\n", "line 2: goes back to step 1"),
    "a long line": (b" " * MAX_LINE_BYTES + GOOD + b"\n", "line 1: has more than 8,192 bytes"),
    "too many lines": (b"\n" * (MAX_RECORDS + 1), "has more than 200,000 lines"),
    "too large": (b" " * (MAX_METRICS_BYTES + 1), "has more than 33,554,432 bytes"),
}


@pytest.mark.parametrize(("contents", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_metrics_are_one_line(contents: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(contents)
    with pytest.raises(UserError, match=r"metrics\.jsonl") as raised:
        read_metrics(path)
    assert reason in str(raised.value)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 500


def test_metrics_come_back_as_they_were_written(tmp_path: Path) -> None:
    written = [record(step, 16, None if step % 2 else 0.5) for step in range(1, 9)]
    written[3]["loss"] = None  # which is what a loss that is no number becomes
    directory = write_run(tmp_path / "run", BATCH_16K, written)
    assert read_metrics(directory / "run_0" / "metrics.jsonl") == written


def test_a_last_line_without_its_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD[:40])
    assert [each["step"] for each in read_metrics(path)] == [1]
    log = tmp_path / "log.txt"
    log.write_text(log_of([(20, 0.5)], 16) + log_line("eval_accuracy", 1)[:30])
    assert len(read_run(log).evaluations) == 1


def test_a_run_is_found_by_its_directory_or_its_parents(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", BATCH_16K, [record(1, 16, 0.5)], ended="aborted")
    run = read_run(directory)
    assert run == read_run(directory / "run_0")
    assert (run.ended, run.initial_weights, run.is_reference) == ("aborted", "checkpoint", True)


def test_one_of_several_runs_must_be_chosen(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", BATCH_16K, [])
    (directory / "run_1").mkdir()
    (directory / "run_1" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"holds 2 runs; give one of them: .*run_0"):
        read_run(directory)


def test_what_is_no_run_is_told_so(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "holds no metrics.jsonl"), (tmp_path / "x", "does not exist")):
        with pytest.raises(UserError, match=reason):
            read_run(path)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ("{}", "schema_version: is missing"),
        ('{"schema_version": 2}', "schema_version: is not 1"),
        ('{"schema_version": 1, "status": "fine"}', "says status 'fine'"),
    ],
)
def test_a_hostile_outcome_is_one_line(outcome: str, reason: str, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", BATCH_16K, [])
    (directory / "run_0" / "outcome.json").write_text(outcome)
    with pytest.raises(UserError, match=reason):
        read_run(directory)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("nothing\n", "holds no line with ':::MLLOG'"),
        ("0: :::MLLOG {}\n", "line 1: is no complete record"),
        (log_line("eval_accuracy", 0.5), "an eval_accuracy of 0.5 at None"),
        (log_line("eval_accuracy", "high", epoch_num=1), "an eval_accuracy of 'high' at 1"),
        (2 * log_line("eval_accuracy", 0.5, epoch_num=1), "an evaluation at 1 samples after one"),
        (log_line("run_stop", None, status={}), "says status a dict"),
    ],
)
def test_a_hostile_log_is_one_line(log: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(log)
    with pytest.raises(UserError, match=reason) as raised:
        read_run(path)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 500
