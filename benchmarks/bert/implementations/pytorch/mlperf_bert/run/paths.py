"""The paths of one run. This file is imported before torch."""

from dataclasses import dataclass
from pathlib import Path

from mlperf_bert.files import is_there, names_in


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Paths of run number `index` below `root`."""

    root: Path
    index: int

    @property
    def mlperf_log(self) -> Path:
        """The MLPerf log."""
        return self.root / f"result_{self.index}.txt"

    @property
    def run(self) -> Path:
        """Directory of this run's own files."""
        return self.root / f"run_{self.index}"

    @property
    def checkpoints(self) -> Path:
        """Directory of this run's checkpoints."""
        return self.run / "checkpoints"

    @property
    def outcome(self) -> Path:
        """The outcome, which is written when the run ends."""
        return self.run / "outcome.json"

    @property
    def exists(self) -> bool:
        """True if a run of this number was started here. Raises UnreadableError."""
        return is_there(self.mlperf_log) or is_there(self.run)

    @property
    def has_checkpoint(self) -> bool:
        """True if the run has written a checkpoint. Raises UnreadableError."""
        return any(name.startswith("step_") for name in names_in(self.checkpoints))
