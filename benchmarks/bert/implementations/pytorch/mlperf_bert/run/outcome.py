"""`run_<i>/outcome.json`: how a run ended, written when it ends in order."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mlperf_bert.common.records import Record, read_record, write_json
from mlperf_bert.common.untrusted import in_brief

OUTCOME_SCHEMA_VERSION = 1
REMEDY = "delete it, and --resume auto trains the run again from its last checkpoint"

Status = Literal["success", "aborted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """How a run ended; the status is MLPerf's of `run_stop`.

    `steps` and `samples` are those of the whole run, `seconds` those of training in all its parts;
    `mlm_accuracy`, 0 .. 1, is that of the last evaluation, if there was one; `stopped_by` is the
    signal that ended a run which had not reached its target.
    """

    status: Status
    steps: int
    samples: int
    seconds: float
    mlm_accuracy: float | None
    stopped_by: str | None

    def to_json(self) -> bytes:
        """The file's contents."""
        return write_json({"schema_version": OUTCOME_SCHEMA_VERSION, **asdict(self)})


def read_outcome(path: Path) -> RunOutcome:
    """Parse an outcome. Raises DataError where it is missing, damaged or of another version."""
    record = read_record(path, missing="is missing", remedy=REMEDY)
    record.check_version(OUTCOME_SCHEMA_VERSION, key="schema_version")
    text = record.text("status")
    status = as_status(text)
    if status is None:
        raise record.error("status", f"is {in_brief(text)}, neither success nor aborted")
    seconds = record.number("seconds")
    if seconds < 0:
        raise record.error("seconds", f"is {in_brief(seconds)}, less than none")
    return RunOutcome(
        status=status,
        steps=record.integer("steps"),
        samples=record.integer("samples"),
        seconds=seconds,
        mlm_accuracy=_accuracy(record),
        stopped_by=record.text("stopped_by") if record.has("stopped_by") else None,
    )


def as_status(value: object) -> Status | None:
    """A status out of a file; None where it is no status."""
    if value == "success":
        return "success"
    return "aborted" if value == "aborted" else None


def _accuracy(record: Record) -> float | None:
    if not record.has("mlm_accuracy"):
        return None
    accuracy = record.number("mlm_accuracy")
    if not 0 <= accuracy <= 1:
        raise record.error("mlm_accuracy", f"is {in_brief(accuracy)}, not in 0 .. 1")
    return accuracy
