"""JSON files: read as they are, and a missing key or an unfit value told in one line.

A prepared set, a run and a checkpoint of one's own are trusted as far as their digests go.
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
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
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
