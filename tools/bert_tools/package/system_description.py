"""The system description of an MLPerf submission: rules that MLCommons' checker does not keep.

Source: MLCommons' submission rules. That every field is there is for the checker to say.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlperf_bert.errors import DataError
from mlperf_bert.files import (
    MAX_JSON_BYTES,
    in_brief,
    parse_json_object,
    read_regular_file,
)

STATUSES = (
    "Available on-premise",
    "Available cloud",
    "Preview",
    "Research, Development, or Internal (RDI)",
)
DIVISIONS = ("closed", "open")

# Whole numbers, written as strings, and their least values.
_COUNTS = {"number_of_nodes": 1, "host_processors_per_node": 1, "accelerators_per_node": 0}
_NEVER_EMPTY = ("submitter", "system_name", "framework")
_USED = ("division", "status", *_COUNTS, *_NEVER_EMPTY)  # without which no check means anything


def read_description(path: Path, name: str) -> tuple[dict[str, Any], list[DataError]]:
    """The description in a file, and its problems, which refer to it as `name`."""
    remedy = "mend it, or copy another of systems/"
    try:
        description = parse_json_object(read_regular_file(path, MAX_JSON_BYTES))
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        return {}, [DataError(name, problem, remedy)]
    except ValueError as error:
        return {}, [DataError(name, f"cannot be read ({error})", remedy)]
    wrong = check_description(description)
    return description, [DataError(name, problem, remedy) for problem in wrong]


def check_description(description: Mapping[str, object]) -> list[str]:
    """Problems of a description, one per string; [] if it has none.

    Stricter than MLCommons' checker, which accepts a field that is no string and fails on it later.
    Any field is allowed.
    """
    problems = [f"{field} is missing" for field in _USED if field not in description]
    for field, value in description.items():
        if not isinstance(value, str):
            problems.append(f"{field} is {in_brief(value)}, and every value must be a string")
        else:
            problems += _check_value(field, value)
    return problems


def _check_value(field: str, value: str) -> list[str]:
    choices = {"division": DIVISIONS, "status": STATUSES}.get(field)
    if choices and value not in choices:
        return [
            f"{field} is {in_brief(value)}, which is not one of {', '.join(map(repr, choices))}"
        ]
    if field in _NEVER_EMPTY and not value.strip():
        return [f"{field} is empty"]
    least = _COUNTS.get(field)
    if least is not None and not (re.fullmatch(r"[0-9]{1,6}", value) and int(value) >= least):
        return [f"{field} is {in_brief(value)}, which is not a whole number of at least {least}"]
    return []
