"""Strict reading of JSON files: every missing key or wrong type is a DataError that names it."""

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import (
    MAX_JSON_BYTES,
    in_brief,
    parse_json_object,
    read_regular_file,
    reading_error,
)

Word = TypeVar("Word", bound=str)
Parsed = TypeVar("Parsed")
# Field types for `parse`: a bare file name, and a number of 0 .. 1.
FileName = Annotated[str, "bare"]
Share = Annotated[float, "share"]

_MOST_NAME_BYTES = 255  # limit of Linux file systems


class Record:
    """One JSON object with typed, bounded getters; `where` opens every error message."""

    def __init__(self, where: str, values: Mapping[str, Any], remedy: str) -> None:
        self.where = where
        self.values = values
        self.remedy = remedy

    def error(self, key: str, problem: str) -> DataError:
        """The error to raise for `key`."""
        return DataError(f"{self.where}: {key}", problem, self.remedy)

    def integer(self, key: str, low: int = 0, high: int = 2**63 - 1) -> int:
        """An integer of low .. high, both included."""
        value = self._get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"is {in_brief(value)}, not an integer of {low} .. {high}")
        return value

    def optional_integer(self, key: str, low: int = 0) -> int | None:
        """An integer of at least `low`, or null."""
        return None if self._get(key) is None else self.integer(key, low)

    def flag(self, key: str) -> bool:
        """A JSON true or false."""
        value = self._get(key)
        if type(value) is not bool:
            raise self.error(key, f"is {in_brief(value)}, not true or false")
        return value

    def text(self, key: str) -> str:
        """A non-empty string."""
        value = self._get(key)
        if type(value) is not str or not value:
            raise self.error(key, f"is {in_brief(value)}, not a non-empty string")
        return value

    def choice(self, key: str, choices: tuple[Word, ...]) -> Word:
        """One of some words; the first of them if the key is missing."""
        value = self.values.get(key, choices[0])
        for choice in choices:
            if type(value) is str and value == choice:
                return choice
        raise self.error(key, f"is {in_brief(value)}, not {' or '.join(choices)}")

    def file_name(self, key: str) -> str:
        """A bare file name, so that no record can point outside its directory."""
        name = self.text(key)
        if name in (".", "..") or "/" in name or "\0" in name or not _fits_a_directory(name):
            raise self.error(key, f"is {in_brief(name)}, not a bare file name")
        return name

    def number(self, key: str) -> float:
        """An integer or a finite number, as float."""
        value = self._get(key)
        if type(value) not in (int, float) or not -1e300 < value < 1e300:
            raise self.error(key, f"is {in_brief(value)}, not a number")
        return float(value)

    def share(self, key: str) -> float:
        """A number of 0 .. 1."""
        value = self.number(key)
        if not 0 <= value <= 1:
            raise self.error(key, f"is {in_brief(value)}, not in 0 .. 1")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers of at least zero."""
        value = self._get(key)
        if type(value) is not list or any(type(item) is not int or item < 0 for item in value):
            raise self.error(key, "is not a list of integers of at least zero")
        return tuple(value)

    def record(self, key: str) -> "Record":
        """A nested object."""
        return self._nested(key, self._get(key))

    def records(self, key: str) -> list["Record"]:
        """A list of objects."""
        value = self._get(key)
        if type(value) is not list:
            raise self.error(key, "is not a list")
        return [self._nested(f"{key}[{number}]", item) for number, item in enumerate(value)]

    def has(self, key: str) -> bool:
        """True if `key` is present and not null."""
        return self.values.get(key) is not None

    def check_version(self, *versions: int, key: str = "format_version") -> None:
        """Refuse a version other than these."""
        found = self.integer(key)
        if found not in versions:
            read = " or ".join(map(str, versions))
            raise self.error(key, f"is {found}, this program reads {read}")

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise self.error(key, "is missing")
        return self.values[key]

    def _nested(self, key: str, value: Any) -> "Record":
        if type(value) is not dict:
            raise self.error(key, "is not an object")
        return Record(f"{self.where}: {key}", value, self.remedy)


def read_record(path: Path, *, missing: str, remedy: str) -> Record:
    """Parse the JSON object in `path`.

    `missing` is the problem to report when there is no such file, `remedy` what the user can do
    about any problem with it. Raises DataError if it is missing, no regular file, too large, or not
    one JSON object; UnreadableError if it cannot be read.
    """
    try:
        values = parse_json_object(read_regular_file(path, MAX_JSON_BYTES))
    except OSError as error:
        raise reading_error(path, error, missing=missing, remedy=remedy) from None
    except ValueError as error:
        raise DataError(str(path), f"is not valid JSON ({error})", remedy) from None
    return Record(str(path), values, remedy)


def parse(kind: type[Parsed], record: Record, **found: Any) -> Parsed:
    """Build a dataclass from a record; `found` gives the fields that are not plain values.

    A field's annotation is its rule: `Annotated[int, low, high]` is bounded, `FileName` and `Share`
    are as above, a `Literal` with a missing key is its first word, and `X | None` is None if the
    key is missing or null. Other keys are required: a field's own default does not count. Raises
    DataError.
    """
    for name, hint in _hints(kind).items():  # type: ignore[arg-type]
        if name not in found:
            found[name] = _plain_value(record, name, hint)
    return kind(**found)


@cache  # a set may have thousands of sidecars
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _plain_value(record: Record, key: str, hint: Any) -> Any:
    if type(None) in get_args(hint):
        return _plain_value(record, key, get_args(hint)[0]) if record.has(key) else None
    if get_origin(hint) is Literal:
        return record.choice(key, get_args(hint))
    if hint in (FileName, Share):
        return record.file_name(key) if hint == FileName else record.share(key)
    of_kind: dict[Any, Callable[..., Any]] = {
        int: record.integer,
        str: record.text,
        bool: record.flag,
        float: record.number,
        tuple: record.integers,
    }
    return of_kind[getattr(hint, "__origin__", hint)](key, *getattr(hint, "__metadata__", ()))


def _fits_a_directory(name: str) -> bool:
    try:
        return len(os.fsencode(name)) <= _MOST_NAME_BYTES
    except UnicodeEncodeError:
        return False


def without_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without keys at their default, so that new keys do not change old files.

    Files with the same meaning, written before and after a key was added, are equal byte by byte
    and have equal digests.
    """
    return {
        key: value for key, value in values.items() if key not in defaults or defaults[key] != value
    }


def write_json(values: Mapping[str, Any]) -> bytes:
    """JSON in the form of prepared sets: indented, keys in the given order."""
    return (json.dumps(values, indent=1, ensure_ascii=True) + "\n").encode("ascii")
