"""Write and read `run_<i>/outcome.json`, which a run writes unless it is killed."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from mlperf_bert.files import check_version, in_brief, parse, read_json, reading, write_json

OUTCOME_SCHEMA_VERSION = 1
REMEDY = "delete this file and use --resume auto, which resumes the run or writes the file again"

Status = Literal["success", "aborted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """The outcome of a run.

    `status` is `success` if the run reached its target or, without a target, its last step. `steps`
    and `samples` count the whole run. `seconds` is the training time over all attempts.
    `mlm_accuracy` (0 .. 1) is from the last evaluation of the last attempt, or None. `stopped_by`
    is the signal that ended the run early, or None.
    """

    status: Status
    steps: int
    samples: int
    seconds: float
    mlm_accuracy: float | None
    stopped_by: str | None

    def in_words(self, target: float | None, context_free: float | None) -> str:
        """Describe the outcome in one line.

        `context_free` is the accuracy of the context-free baseline (0 .. 1).
        """
        reached = self.mlm_accuracy
        how_far = f"{self.samples:,} samples, {self.steps:,} steps"
        seconds = f"{self.seconds:.1f} s of training"
        known = "" if reached is None else f"; accuracy {reached:.4f}"
        if self.stopped_by is not None:
            return f"stopped by {self.stopped_by} after {how_far}, {seconds}{known}"
        if target is None:
            if reached and context_free:
                known += f", {reached / context_free:.2f} x the context-free baseline"
            return f"{self.steps:,} steps, {self.samples:,} samples, {seconds}{known}"
        if self.status == "success":
            return f"target reached after {how_far}, {seconds}"
        more = "; to train longer, raise run.max_steps and schedule.decay_steps"
        if reached is not None and reached >= target:
            more = ", but in the closed division, an evaluation that is not due does not count"
        return f"target NOT reached after {how_far}, {seconds}{known} of {target:g}{more}"

    def to_json(self) -> bytes:
        """Return the contents of `outcome.json`."""
        return write_json({"schema_version": OUTCOME_SCHEMA_VERSION, **asdict(self)})


def read_outcome(path: Path) -> RunOutcome:
    """Read an outcome. Raises DataError if the file is missing, damaged or of another version."""
    values = read_json(path, missing="is missing", remedy=REMEDY)
    with reading(path, REMEDY):
        check_version(values, OUTCOME_SCHEMA_VERSION, key="schema_version")
        outcome = parse(RunOutcome, values)
        if outcome.status not in get_args(Status):
            raise ValueError(f"status is {in_brief(outcome.status)}, neither success nor aborted")
        for name in ("steps", "samples", "seconds"):
            if type(getattr(outcome, name)) not in (int, float):
                raise ValueError(f"{name} is {in_brief(values[name])}, not a number")
        return outcome
