"""A run's files seen from outside: its phase, its trace, its checkpoints."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from mlperf_bert.checkpoint.load import load_weights
from mlperf_bert.checkpoint.manifest import complete_checkpoints, read_config, read_manifest, verify
from mlperf_bert.model.bert import make_model
from support import mlperf_records

# Of a record of metrics.jsonl: what is no time and no memory, so the same in every such run.
TRACED = (
    *("step", "samples", "loss", "mlm_accuracy", "learning_rate", "grad_norm"),
    *("clipped_fraction", "skipped_steps"),
)


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

    def lines(self):
        """Lines of metrics.jsonl, without one that was cut off."""
        if not self.metrics.exists():
            return []
        return self.metrics.read_text(encoding="utf-8").split("\n")[:-1]

    def records(self):
        return [json.loads(line) for line in self.lines()]

    def trace(self):
        """Everything that must be equal in equal runs, record by record, every bit of it."""
        return [tuple(record[key] for key in TRACED) for record in self.records()]

    def last_step(self):
        """The step of the last record; 0 if there is none."""
        return next((json.loads(line)["step"] for line in reversed(self.lines())), 0)

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
        try:
            log = self.run.log.read_text(encoding="ascii")
        except FileNotFoundError:  # moved away at this moment
            return "start-up"
        if self.run.log_inode() == self._old_log or '"run_start"' not in log:
            return "start-up"
        if '"run_stop"' in log:
            return "end"
        is_evaluated = log.rfind('"eval_start"') > log.rfind('"eval_stop"')
        return "evaluation" if is_evaluated else "step"

    def has_begun(self):
        """Whether it has a log of its own that says what the run goes on from."""
        is_new = self.run.log_inode() not in (0, self._old_log)
        return is_new and bool(mlperf_records(self.run.log, "resumed"))
