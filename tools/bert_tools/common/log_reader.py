"""Strict reader of MLPerf logs, which anybody may have written.

Our own writer is `mlperf_bert/run/mlperf_log.py`; a line that it cannot have written is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_bert.errors import DataError
from mlperf_bert.files import parse_json_object, read_regular_file

TOKEN = ":::MLLOG "
MAX_LOG_BYTES = 8 * 2**20  # a log of ours has 150 kB, also of a run on 1,024 ranks
AS_WRITTEN = "use the log as the run wrote it"


@dataclass(frozen=True, slots=True)
class Record:
    """One record, on line `line` of the file; `time_ms` since the epoch."""

    key: str
    value: Any
    metadata: Mapping[str, Any]
    time_ms: int
    line: int


@dataclass(frozen=True, slots=True)
class RunLog:
    """The records of one log in their order; `name` is what problems call it."""

    name: str
    records: tuple[Record, ...]

    def named(self, key: str) -> list[Record]:
        """All records with that key."""
        return [record for record in self.records if record.key == key]

    def last_number(self, key: str) -> float | None:
        """The last positive value in records of that key; None if there is none."""
        values = [record.value for record in self.named(key)]
        return next((each for each in reversed(values) if is_number(each) and each > 0), None)

    def last_text(self, key: str) -> str | None:
        """The last text in a record of that key; None if there is none."""
        values = [record.value for record in self.named(key)]
        return next((each for each in reversed(values) if isinstance(each, str)), None)


def read_log(path: Path, name: str) -> RunLog:
    """Read a log. Raises DataError if it is too large or holds anything but records."""
    lines = _read_text(path, name).split("\n")  # str.splitlines would cut at more than that
    records = tuple(
        _read_record(text, name, line) for line, text in enumerate(lines, 1) if text.strip()
    )
    if not records:
        raise DataError(name, "is empty", AS_WRITTEN)
    return RunLog(name, records)


def read_foreign_log(path: Path, name: str) -> RunLog:
    """The records of a foreign log, wherever they stand among other output.

    An unfinished last line is left out: the run was killed, or is still running. Raises DataError
    if the file is too large, holds no record, or an unreadable one.
    """
    lines = _read_bytes(path, name).decode("utf-8", errors="replace").split("\n")[:-1]
    records = []
    for line, text in enumerate(lines, 1):
        _, token, rest = text.partition(TOKEN)
        if token:
            records.append(_read_record(token + rest, name, line))
    if not records:
        raise DataError(name, f"holds no line with {TOKEN.strip()!r}", "give an MLPerf log")
    return RunLog(name, tuple(records))


def is_number(value: object) -> bool:
    """True if a JSON value is a finite number; booleans are none."""
    if type(value) is int:
        return abs(value) < 2**63
    return type(value) is float and math.isfinite(value)


def _read_text(path: Path, name: str) -> str:
    try:
        return _read_bytes(path, name).decode("ascii")
    except UnicodeDecodeError:
        raise DataError(name, "is not ASCII text", AS_WRITTEN) from None


def _read_bytes(path: Path, name: str) -> bytes:
    try:
        return read_regular_file(path, MAX_LOG_BYTES)
    except OSError as error:
        raise DataError(name, error.strerror or "cannot be read", AS_WRITTEN) from None


def _read_record(text: str, name: str, line: int) -> Record:
    where = f"{name}, line {line}"
    if not text.startswith(TOKEN):
        raise DataError(where, f"does not begin with {TOKEN.strip()!r}", AS_WRITTEN)
    try:
        found = parse_json_object(text.removeprefix(TOKEN))
    except ValueError as error:
        raise DataError(where, f"is no record ({error})", AS_WRITTEN) from None
    key, metadata, time_ms = found.get("key"), found.get("metadata"), found.get("time_ms")
    is_named = isinstance(key, str) and isinstance(metadata, dict)
    if not is_named or "value" not in found or type(time_ms) is not int or not is_number(time_ms):
        raise DataError(where, "is no complete record", AS_WRITTEN)
    return Record(str(key), found["value"], metadata or {}, time_ms, line)
