"""The paths of the files of a run. This file is imported before torch."""

from dataclasses import dataclass
from pathlib import Path

from mlperf_bert.files import is_there, names_in


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The paths of the files of run number `index` in `root`."""

    root: Path
    index: int

    @property
    def mlperf_log(self) -> Path:
        """Path of the run's MLPerf log."""
        return self.root / f"result_{self.index}.txt"

    @property
    def run(self) -> Path:
        """Directory of this run's own files, `run_<index>`."""
        return self.root / f"run_{self.index}"

    @property
    def checkpoints(self) -> Path:
        """Directory of this run's checkpoints."""
        return self.run / "checkpoints"

    @property
    def started_from(self) -> Path:
        """Path of a file with the path of another run's checkpoint, if this run began there."""
        return self.run / "started_from.json"

    @property
    def outcome(self) -> Path:
        """Path of the outcome, a file that is written when the run ends."""
        return self.run / "outcome.json"

    @property
    def exists(self) -> bool:
        """True if a run with this index was started in `root`. Raises UnreadableError."""
        return is_there(self.mlperf_log) or is_there(self.run)

    @property
    def has_checkpoint(self) -> bool:
        """True if the run has at least one saved checkpoint. Raises UnreadableError."""
        return any(name.startswith("step_") for name in names_in(self.checkpoints))
