"""The system description of an MLPerf submission: its fields and its rules.

Source: system_desc_checker of mlperf-logging 4.1.68 (the fields), and MLCommons' submission rules.
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

FIELDS = (
    "submitter",
    "division",
    "status",
    "system_name",
    "number_of_nodes",
    "host_processors_per_node",
    "host_processor_model_name",
    "host_processor_core_count",
    "host_processor_vcpu_count",
    "host_processor_frequency",
    "host_processor_caches",
    "host_processor_interconnect",
    "host_memory_capacity",
    "host_memory_configuration",
    "host_storage_type",
    "host_storage_capacity",
    "host_networking",
    "host_networking_topology",
    "accelerators_per_node",
    "accelerator_model_name",
    "accelerator_host_interconnect",
    "accelerator_frequency",
    "accelerator_on-chip_memories",
    "accelerator_memory_configuration",
    "accelerator_memory_capacity",
    "accelerator_interconnect",
    "accelerator_interconnect_topology",
    "cooling",
    "hw_notes",
    "framework",
    "other_software_stack",
    "operating_system",
    "sw_notes",
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

    Stricter than the checkers, which accept a field that is no string and fail on it later. Fields
    beyond FIELDS are allowed.
    """
    problems = []
    for field in FIELDS:
        if field not in description:
            problems.append(f"{field} is missing")
            continue
        value = description[field]
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
