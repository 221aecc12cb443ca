"""The system description of an MLPerf submission: its fields, its rules, and a first draft of one.

Source: system_desc_checker of mlperf-logging 4.1.68 (the fields), and MLCommons' submission rules.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_tools.common.machine import Gpu, Machine, Nic
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
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """`stack`: other relevant packages and their versions, "" for a missing one.

    `gpus`: names of the GPUs that the framework sees; `gpu_memory_bytes`: of one, 0 without any.
    """

    framework: str
    stack: Mapping[str, str]
    gpus: Sequence[str] = ()
    gpu_memory_bytes: int = 0


def read_description(path: Path, name: str) -> tuple[dict[str, Any], list[DataError]]:
    """The description in a file, and its problems, which refer to it as `name`."""
    remedy = "mend it; `mlperf_bert system describe` writes a new one"
    try:
        description = parse_json_object(read_regular_file(path, MAX_JSON_BYTES))
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        wanted = "name a JSON file; `mlperf_bert system describe` writes one"
        return {}, [DataError(name, problem, wanted)]
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


def describe(
    machine: Machine, software: Software, *, name: str, submitter: str, nodes: int
) -> dict[str, str]:
    """A description of `nodes` machines such as this one; "" marks unknown values.

    Division and status claim the least: open, and a system for research.
    """
    known = {
        "submitter": submitter,
        "division": "open",
        "status": STATUSES[-1],
        "system_name": name,
        "number_of_nodes": str(nodes),
        "host_processors_per_node": str(max(machine.sockets, 1)),
        "host_processor_model_name": machine.cpu_model,
        "host_processor_core_count": str(machine.cores_per_socket or machine.logical_cpus),
        "host_processor_vcpu_count": str(machine.logical_cpus),
        "host_processor_frequency": f"{machine.cpu_mhz / 1000:g} GHz" if machine.cpu_mhz else "",
        "host_processor_caches": machine.caches,
        "host_memory_capacity": _gib(machine.memory_bytes),
        "host_networking": ", ".join(_counted(_card(nic) for nic in machine.nics)),
        "framework": software.framework,
        "other_software_stack": ", ".join(
            f"{package} {version}" for package, version in software.stack.items() if version
        ),
        "operating_system": machine.os,
    }
    return dict.fromkeys(FIELDS, "") | known | _accelerators(machine.gpus, software)


def unknown_fields(description: Mapping[str, str]) -> list[str]:
    """The empty fields in which "" does not mean "none"."""
    can_be_empty = {"hw_notes", "sw_notes"}
    without_accelerators = description["accelerators_per_node"] == "0"
    return [
        field
        for field in FIELDS
        if not description[field]
        and field not in can_be_empty
        and not (without_accelerators and field.startswith("accelerator"))
    ]


def default_name(machine: Machine, software: Software, nodes: int) -> str:
    """A name for the system, such as 8x_a100-sxm4-80gb_n1_pytorch or cpu_2core_pytorch."""
    gpus = [gpu.name for gpu in machine.gpus] or list(software.gpus)
    if not gpus:
        cores = len(machine.cores) or machine.logical_cpus
        return f"cpu_{cores}core_pytorch" if nodes == 1 else f"cpu_{cores}core_n{nodes}_pytorch"
    model = gpus[0].lower().removeprefix("nvidia ")
    slug = re.sub(r"[^a-z0-9]+", "-", model).strip("-")
    return f"{len(gpus)}x_{slug}_n{nodes}_pytorch"


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


def _accelerators(gpus: Sequence[Gpu], software: Software) -> dict[str, str]:
    names = [gpu.name for gpu in gpus] or list(software.gpus)
    return {
        "accelerators_per_node": str(len(names)),
        "accelerator_model_name": ", ".join(dict.fromkeys(names)),
        "accelerator_memory_capacity": _gib(software.gpu_memory_bytes),
    }


def _card(nic: Nic) -> str:
    kind = {"infiniband": "InfiniBand", "ethernet": "Ethernet"}[nic.kind]
    return f"{kind} {nic.gbit_per_s:g} Gbit/s" if nic.gbit_per_s else kind


def _counted(names: Iterable[str]) -> list[str]:
    return [f"{count}x {name}" for name, count in Counter(names).items()]


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.0f} GiB" if size_bytes else ""
