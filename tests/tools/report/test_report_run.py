"""Run directories and logs from outside: found and read, or one line of error."""

from pathlib import Path

import pytest
from run_cases import BATCH_16K, log_line, log_of, read_only, record, write_run

from mlperf_bert.common.errors import UserError


def test_a_run_is_found_by_its_directory_or_its_parents(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", BATCH_16K, [record(1, 16, 0.5)], ended="aborted")
    run = read_only(directory)
    assert run == read_only(directory / "run_0")
    assert (run.ended, run.initial_weights, run.task.is_reference) == (
        "aborted",
        "checkpoint",
        True,
    )


def test_one_of_several_runs_must_be_chosen(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", BATCH_16K, [])
    (directory / "run_1").mkdir()
    (directory / "run_1" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"holds 2 runs; give one of them: .*run_0"):
        read_only(directory)


def test_what_is_no_run_is_told_so(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "holds no run"), (tmp_path / "x", "does not exist")):
        with pytest.raises(UserError, match=reason):
            read_only(path)


def test_a_hostile_outcome_is_one_line(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", BATCH_16K, [])
    (directory / "run_0" / "outcome.json").write_text('{"schema_version": 1, "status": "fine"}')
    with pytest.raises(UserError, match=r"outcome\.json: status: is 'fine'"):
        read_only(directory)


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
        read_only(path)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 500


def test_a_logs_last_line_without_its_end_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(log_of([(20, 0.5)], 16) + log_line("eval_accuracy", 1)[:30])
    assert len(read_only(log).evaluations) == 1
