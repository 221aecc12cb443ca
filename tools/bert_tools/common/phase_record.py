"""Writes and reads `phases.json`, the state of all phases in a run directory.

The command `phases` writes this file, and `watch` reads it. Phase i is the run `run_<i>` of that
directory. A killed command leaves its phase marked as running until the command is repeated.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from mlperf_bert.files import (
    check_version,
    in_brief,
    is_there,
    parse,
    read_json,
    reading,
    write_file,
    write_json,
)

PHASES = "phases.json"
PHASES_SCHEMA_VERSION = 1
_REMEDY = "delete this file, which `mlperf_bert phases` writes again"

PhaseStatus = Literal["waiting", "running", "stopped", "failed", "finished"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRecord:
    """The state of one phase.

    `steps`, `samples`, `seconds` of training and `accuracy` (0 .. 1) are those of the phase's
    outcome, and None before it has one. A `failed` phase has ended before its last step, so that no
    other phase may start from it.
    """

    name: str
    status: PhaseStatus
    steps: int | None = None
    samples: int | None = None
    seconds: float | None = None
    accuracy: float | None = None


def write_phases(root: Path, records: Sequence[PhaseRecord]) -> None:
    """Write the states of all phases in `root`. Raises DataError if the file cannot be written."""
    values = {
        "schema_version": PHASES_SCHEMA_VERSION,
        "phases": [asdict(each) for each in records],
    }
    write_file(root / PHASES, write_json(values))


def read_phases(root: Path) -> list[PhaseRecord]:
    """Read the states of all phases in `root`. The list is empty if there is no file.

    Raises DataError if the file is damaged or of another version.
    """
    path = root / PHASES
    if not is_there(path):
        return []
    values = read_json(path, missing="is missing", remedy=_REMEDY)
    with reading(path, _REMEDY):
        check_version(values, PHASES_SCHEMA_VERSION, key="schema_version")
        records = [parse(PhaseRecord, dict(each)) for each in values["phases"]]
        for record in records:
            if record.status not in get_args(PhaseStatus):
                raise ValueError(f"{in_brief(record.status)} is not the status of a phase")
        return records
