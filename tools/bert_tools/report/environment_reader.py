"""Reads `environment.json`, what a run ran on, as flat texts: anybody may have written it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.records import Record, read_record
from mlperf_bert.common.untrusted import in_brief

MAX_FACTS = 200
_LONGEST = 300  # characters of a fact
_REMEDY = "use the file as the run wrote it, or take it away"


def read_environment(path: Path) -> dict[str, str]:
    """Facts by name in their order; those of `packages` as `packages.torch`.

    Raises DataError where it is missing, damaged, of another version or holds what is no fact.
    """
    record = read_record(path, missing="is missing", remedy=_REMEDY)
    record.check_version(1, key="schema_version")
    found: dict[str, str] = {}
    for key, value in record.values.items():
        if key == "schema_version":
            continue
        if isinstance(value, dict):
            found |= {f"{key}.{name}": _in_words(record, key, each) for name, each in value.items()}
        else:
            found[key] = _in_words(record, key, value)
        if len(found) > MAX_FACTS:
            raise DataError(str(path), f"holds more than {MAX_FACTS} facts", _REMEDY)
    return found


def _in_words(record: Record, key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value[:_LONGEST]
    if isinstance(value, bool | int | float):
        return in_brief(value)
    raise record.error(in_brief(key), f"holds {in_brief(value)}, no text or number")


def device_in_words(environment: Mapping[str, str]) -> str:
    """As `2 ranks on cpu` of what there is; empty where nothing is said."""
    ranks, device = environment.get("world_size"), environment.get("device")
    if not ranks or not device:
        return device or ""
    return f"{ranks} rank{'' if ranks == '1' else 's'} on {device}"
