"""Reads `metrics.jsonl` strictly: it comes from a directory that anybody may have written."""

from pathlib import Path
from typing import Any

from bert_tools.common.log_reader import is_number
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import in_brief, parse_json_object, read_regular_file

MAX_METRICS_BYTES = 32 * 2**20  # 50,000 records of ours
MAX_LINE_BYTES = 8 * 2**10  # a record of ours has 0.7 kB
MAX_RECORDS = 200_000

_REMEDY = "use the file as the run wrote it"
_COUNTS = ("step", "samples", "skipped_steps")
_NUMBERS_OR_NULL = ("loss", "mlm_accuracy")
_LARGEST = 1e300


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`: finite numbers or None by key, `step` ascending.

    A last line without its end is left out: the run was killed, or is still running.

    Raises DataError naming the file and the line: too large, no record, a number that is none, or
    one of `step`, `samples`, `loss`, `mlm_accuracy` and `skipped_steps` missing or impossible.
    """
    try:
        contents = read_regular_file(path, MAX_METRICS_BYTES)
    except FileNotFoundError:
        raise DataError(str(path), "is missing", "give the directory of a run") from None
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", _REMEDY) from None
    lines = contents.split(b"\n")[:-1]
    if len(lines) > MAX_RECORDS:
        raise DataError(str(path), f"has more than {MAX_RECORDS:,} lines", _REMEDY)
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        record = read_metrics_record(line, where)
        if records and record["step"] <= records[-1]["step"]:
            raise DataError(where, f"goes back to step {record['step']}", _REMEDY)
        records.append(record)
    return records


def read_metrics_record(line: bytes, where: str) -> dict[str, Any]:
    """One line of a `metrics.jsonl`, without its end. Raises DataError, which begins with where."""
    if len(line) > MAX_LINE_BYTES:
        raise DataError(where, f"has more than {MAX_LINE_BYTES:,} bytes", _REMEDY)
    try:
        record = parse_json_object(line)
    except ValueError as error:
        raise DataError(where, f"is no record ({error})", _REMEDY) from None
    for key, value in record.items():
        if value is not None and not (is_number(value) and abs(value) < _LARGEST):
            raise DataError(where, f"{in_brief(key)} is {in_brief(value)}, no number", _REMEDY)
    for key in _COUNTS:
        if type(record.get(key)) is not int or record[key] < 0:
            problem = f"{key} is {in_brief(record.get(key))}, no count"
            raise DataError(where, problem, _REMEDY)
    for key in _NUMBERS_OR_NULL:
        if key not in record:
            raise DataError(where, f"{key} is missing", _REMEDY)
    accuracy = record["mlm_accuracy"]
    if accuracy is not None and not 0 <= accuracy <= 1:
        raise DataError(where, f"mlm_accuracy is {in_brief(accuracy)}, not in 0 .. 1", _REMEDY)
    return record
