"""Logs from outside: whatever they hold, one line says what is wrong."""

import pytest

from bert_tools.common.log_reader import (
    MAX_LOG_BYTES,
    Record,
    RunLog,
    read_foreign_log,
    read_log,
)
from mlperf_bert.errors import DataError

HOSTILE = {
    "not ASCII": (b"\xff\xfe", "the log is not ASCII text"),
    "empty": (b"\n", "the log is empty"),
    "other output": (b"Traceback: 1\n", "line 1: the line does not start with ':::MLLOG'"),
    "no JSON": (b":::MLLOG {", "line 1: the record cannot be parsed"),
    "a list": (b":::MLLOG []", "line 1: the record cannot be parsed"),
    "deep": (b":::MLLOG " + b"[" * 100_000, "line 1: the record cannot be parsed"),
    "digits": (b':::MLLOG {"value": ' + b"9" * 5000 + b"}", "line 1: the record cannot be parsed"),
    "two records": (b":::MLLOG {}:::MLLOG {}", "line 1: the record cannot be parsed"),
    "no time": (b':::MLLOG {"key": "a", "value": 1, "metadata": {}}', "the record has no valid"),
    "huge": (b" " * (MAX_LOG_BYTES + 1), "is larger than 8,388,608 bytes"),
}


@pytest.mark.parametrize(("contents", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_log_is_one_line(contents, reason, tmp_path):
    path = tmp_path / "result_0.txt"
    path.write_bytes(contents)
    with pytest.raises(DataError, match=reason) as raised:
        read_log(path, "result_0.txt")
    assert str(raised.value).isprintable() and len(str(raised.value)) < 300


@pytest.mark.parametrize(("end", "count"), [("", 2), ("\n", 2), ("\n:::MLLOG {", 2), (" and", 1)])
def test_the_last_line_counts_if_it_is_whole(tmp_path, end, count):
    """Editors and copies leave out the last end of line, and a killed run half a record."""
    record = ':::MLLOG {"key": "a", "value": 1, "metadata": {}, "time_ms": 1}'
    path = tmp_path / "result_0.txt"
    path.write_text(f"other output\n{record}\n{record}{end}")
    assert len(read_foreign_log(path, "result_0.txt").records) == count


def test_a_number_that_cannot_be_is_passed_over():
    records = [Record("seed", value, {}, 0, 1) for value in (7, 0, -1, "8", None)]
    assert RunLog("log", tuple(records)).last_number("seed") == 7
    assert RunLog("log", tuple(records[1:])).last_number("seed") is None
