"""A strict reader of MLPerf logs.

A log may come from an untrusted source, so the reader checks every line. It raises an error for a
line that our own writer, `mlperf_bert/run/mlperf_log.py`, cannot have written.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_bert.errors import DataError
from mlperf_bert.files import parse_json_object, read_regular_file

TOKEN = ":::MLLOG "
MAX_LOG_BYTES = 8 * 2**20  # our own logs have about 150 kB, even those of 1,024 ranks
AS_WRITTEN = "use the log file exactly as the run wrote it"


@dataclass(frozen=True, slots=True)
class Record:
    """One record of an MLPerf log.

    `time_ms` is in milliseconds since the Unix epoch, and `line` is the number of its line in the
    file.
    """

    key: str
    value: Any
    metadata: Mapping[str, Any]
    time_ms: int
    line: int


@dataclass(frozen=True, slots=True)
class RunLog:
    """The records of one log in their order, and the log's `name` for error messages."""

    name: str
    records: tuple[Record, ...]

    def named(self, key: str) -> list[Record]:
        """Return all records of the log that have this key, in order."""
        return [record for record in self.records if record.key == key]

    def last_number(self, key: str) -> float | None:
        """Return the last positive number that was logged with this key, or None."""
        values = [record.value for record in self.named(key)]
        return next((each for each in reversed(values) if is_number(each) and each > 0), None)

    def last_text(self, key: str) -> str | None:
        """Return the last text that was logged with this key, or None."""
        values = [record.value for record in self.named(key)]
        return next((each for each in reversed(values) if isinstance(each, str)), None)


def read_log(path: Path, name: str) -> RunLog:
    """Read a log that this program wrote.

    Raises DataError if the log is too large or empty, or if a line is not a record.
    """
    lines = _read_text(path, name).split("\n")  # str.splitlines also splits at other characters
    records = tuple(
        _read_record(text, name, line) for line, text in enumerate(lines, 1) if text.strip()
    )
    if not records:
        raise DataError(name, "the log is empty", AS_WRITTEN)
    return RunLog(name, records)


def read_foreign_log(path: Path, name: str) -> RunLog:
    """Read the records of another program's log, which may have other output between its records.

    An incomplete record at the end is ignored, because the run may still be writing or was killed.
    Raises DataError if the file is too large, has no record, or has a damaged record.
    """
    lines = _read_bytes(path, name).decode("utf-8", errors="replace").split("\n")
    records = []
    for line, text in enumerate(lines, 1):
        _, token, rest = text.partition(TOKEN)
        try:
            if token:
                records.append(_read_record(token + rest, name, line))
        except DataError:
            if line < len(lines):
                raise
    if not records:
        raise DataError(name, f"no line contains {TOKEN.strip()!r}", "pass an MLPerf log")
    return RunLog(name, tuple(records))


def is_number(value: object) -> bool:
    """Return whether a JSON value is a finite number. Booleans do not count as numbers."""
    if type(value) is int:
        return abs(value) < 2**63
    return type(value) is float and math.isfinite(value)


def _read_text(path: Path, name: str) -> str:
    try:
        return _read_bytes(path, name).decode("ascii")
    except UnicodeDecodeError:
        raise DataError(name, "the log is not ASCII text", AS_WRITTEN) from None


def _read_bytes(path: Path, name: str) -> bytes:
    try:
        return read_regular_file(path, MAX_LOG_BYTES)
    except OSError as error:
        raise DataError(name, error.strerror or "cannot be read", AS_WRITTEN) from None


def _read_record(text: str, name: str, line: int) -> Record:
    where = f"{name}, line {line}"
    if not text.startswith(TOKEN):
        raise DataError(where, f"the line does not start with {TOKEN.strip()!r}", AS_WRITTEN)
    try:
        found = parse_json_object(text.removeprefix(TOKEN))
    except ValueError as error:
        raise DataError(where, f"the record cannot be parsed ({error})", AS_WRITTEN) from None
    key, metadata, time_ms = found.get("key"), found.get("metadata"), found.get("time_ms")
    is_named = isinstance(key, str) and isinstance(metadata, dict)
    if not is_named or "value" not in found or type(time_ms) is not int or not is_number(time_ms):
        raise DataError(where, "the record has no valid key, value, metadata or time", AS_WRITTEN)
    return Record(str(key), found["value"], metadata or {}, time_ms, line)
