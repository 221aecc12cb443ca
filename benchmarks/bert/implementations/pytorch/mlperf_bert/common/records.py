"""JSON files: our own, and the settings beside models that other people have published.

A prepared set, a run and a checkpoint of one's own are trusted as far as their digests go: their
values are taken as they are, and `reading` turns a missing key or an unfit value into one line. A
`Record` is for the files of others: each getter checks the value and names it.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

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


def read_json(path: Path, *, missing: str, remedy: str) -> dict[str, Any]:
    """Parse the JSON object in `path`.

    `missing` is the problem to report when there is no such file, `remedy` what the user can do
    about any problem with it. Raises DataError if it is missing, no regular file, too large, or not
    one JSON object; UnreadableError if it cannot be read.
    """
    try:
        return parse_json_object(read_regular_file(path, MAX_JSON_BYTES))
    except OSError as error:
        raise reading_error(path, error, missing=missing, remedy=remedy) from None
    except ValueError as error:
        raise DataError(str(path), f"is not valid JSON ({error})", remedy) from None


@contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Within it, a missing key or an unfit value becomes a DataError that names the file.

    A ValueError says in its own words what is wrong.
    """
    try:
        yield
    except KeyError as error:
        raise DataError(str(path), f"has no key {error}", remedy) from None
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(str(path), str(error), remedy) from None


def parse(kind: type[Parsed], values: Mapping[str, Any], **found: Any) -> Parsed:
    """Build a dataclass from the keys of its fields; `found` gives fields that need conversion.

    A missing key has the field's default, other keys are left out. Raises KeyError.
    """
    for field in fields(kind):  # type: ignore[arg-type]
        is_needed = field.default is MISSING and field.default_factory is MISSING
        if field.name not in found and (is_needed or field.name in values):
            found[field.name] = values[field.name]
    return kind(**found)


def check_version(values: Mapping[str, Any], *versions: int, key: str = "format_version") -> None:
    """Raise ValueError for a version other than these, KeyError for none."""
    if values[key] not in versions:
        read = " or ".join(map(str, versions))
        raise ValueError(f"{key} is {in_brief(values[key])}, this program reads {read}")


def bare_name(name: str) -> str:
    """The same name, if it leads nowhere else than into its directory. Raises ValueError."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{in_brief(name)} is not a bare file name")
    return name


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


class Record:
    """One JSON object of another program; `where` opens every error message."""

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

    def number(self, key: str) -> float:
        """An integer or a finite number, as float."""
        value = self._get(key)
        if type(value) not in (int, float) or not -1e300 < value < 1e300:
            raise self.error(key, f"is {in_brief(value)}, not a number")
        return float(value)

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
        """A bare file name."""
        try:
            return bare_name(self.text(key))
        except ValueError as error:
            raise self.error(key, str(error)) from None

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

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise self.error(key, "is missing")
        return self.values[key]

    def _nested(self, key: str, value: Any) -> "Record":
        if type(value) is not dict:
            raise self.error(key, "is not an object")
        return Record(f"{self.where}: {key}", value, self.remedy)


def read_record(path: Path, *, missing: str, remedy: str) -> Record:
    """`read_json` for a file of another program."""
    return Record(str(path), read_json(path, missing=missing, remedy=remedy), remedy)
