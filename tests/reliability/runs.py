"""A run's files seen from outside: its phase, its trace, its checkpoints."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from mlperf_bert.checkpoint.load import load_weights
from mlperf_bert.checkpoint.manifest import complete_checkpoints, read_config, read_manifest, verify
from mlperf_bert.model.bert import make_model
from support import mlperf_records

Phase = Literal["start-up", "step", "evaluation", "checkpoint", "end"]

# Of a record of metrics.jsonl: what is no time and no memory, so the same in every such run.
TRACED = (
    *("step", "samples", "loss", "mlm_accuracy", "learning_rate", "grad_norm"),
    *("clipped_fraction", "skipped_steps"),
)
_STOPPED = '"run_stop"'
TAIL_BYTES = 8192  # of the MLPerf log: more than is written between two evaluations


@dataclass(frozen=True)
class Run:
    """The run number 0 of a run directory."""

    root: Path

    @property
    def directory(self):
        return self.root / "run_0"

    @property
    def log(self):
        return self.root / "result_0.txt"

    @property
    def metrics(self):
        return self.directory / "metrics.jsonl"

    @property
    def checkpoints(self):
        return self.directory / "checkpoints"

    def records(self):
        """Records of metrics.jsonl, without a line that was cut off."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def trace(self):
        """Everything that must be equal in equal runs, record by record, every bit of it."""
        return [tuple(record[key] for key in TRACED) for record in self.records()]

    def last_step(self):
        """The step of the last record; 0 if there is none."""
        try:
            with self.metrics.open("rb") as file:
                file.seek(max(0, self.metrics.stat().st_size - TAIL_BYTES))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return 0
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def partials(self):
        """Names of checkpoints that are being written, or were."""
        return {path.name for path in self.checkpoints.glob(".step_*.partial")}

    def newest_step(self):
        """The step of the newest checkpoint; 0 if there is none."""
        found = complete_checkpoints(self.checkpoints)
        return read_manifest(found[0]).step if found else 0

    def resumed_from(self):
        """Step of the checkpoint that the MLPerf log says the run went on from; 0: from none."""
        (record,) = mlperf_records(self.log, "resumed")
        return int(record["metadata"]["step"]) if record["value"] else 0

    def log_inode(self):
        """The inode of the MLPerf log; 0 if there is none."""
        return self.log.stat().st_ino if self.log.exists() else 0

    def final_state(self):
        """Contents of every tensor file of the newest checkpoint."""
        newest = complete_checkpoints(self.checkpoints)[0]
        files = sorted(newest.rglob("*.safetensors"))
        return {str(path.relative_to(self.checkpoints)): path.read_bytes() for path in files}

    def outcome(self):
        """The run's outcome without its duration."""
        found = json.loads((self.directory / "outcome.json").read_text())
        return {key: value for key, value in found.items() if key != "seconds"}

    def check_so_far(self, whole):
        """Check that all records so far are those of another run, and the checkpoints whole."""
        trace = self.trace()
        assert trace == whole.trace()[: len(trace)]
        self.check_checkpoints()

    def check_final(self, whole):
        """Check that it ended as another run did, every bit of it."""
        assert self.trace() == whole.trace()
        assert self.final_state() == whole.final_state()
        assert self.outcome() == whole.outcome()
        self.check_checkpoints()

    def check_checkpoints(self):
        """Verify and load all that bear a checkpoint's name; how many there are."""
        named = list(self.checkpoints.glob("step_*"))
        assert {path.name for path in named} == {
            path.name for path in complete_checkpoints(self.checkpoints)
        }
        for path in named:
            state = verify(path)
            model = make_model(read_config(path), 0, torch.device("cpu"))
            assert load_weights(model, path, state.vocabulary_sha256) == state
        return len(named)


class Attempt:
    """A run while one of its jobs is at work, which may go on from what others left."""

    def __init__(self, run):
        self.run = run
        self._old_log = run.log_inode()
        self._old_partials = run.partials()

    def phase(self):
        """The present phase of the run; `end` after the clock has stopped."""
        if self.run.partials() - self._old_partials:
            return "checkpoint"
        if self.run.log_inode() == self._old_log:
            return "start-up"
        tail = self._tail_of_log()
        if _STOPPED in tail:
            return "end"
        if tail.rfind('"eval_start"') > tail.rfind('"eval_stop"'):
            return "evaluation"
        # Once it has begun, later records push it out of the tail.
        is_running = '"run_start"' in tail or '"eval_stop"' in tail
        return "step" if is_running else "start-up"

    def has_stopped(self):
        """Whether its clock has."""
        return self.run.log_inode() != self._old_log and _STOPPED in self._tail_of_log()

    def has_begun(self):
        """Whether it has a log of its own that says what the run goes on from."""
        is_new = self.run.log_inode() not in (0, self._old_log)
        return is_new and bool(mlperf_records(self.run.log, "resumed"))

    def _tail_of_log(self):
        try:
            with self.run.log.open("rb") as file:
                file.seek(max(0, self.run.log.stat().st_size - TAIL_BYTES))
                return file.read().decode("ascii")
        except FileNotFoundError:  # moved away at this moment
            return ""
