"""What the person who started a run may type next: to watch it, go on, or see its results."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mlperf_bert.errors import typed
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.run.outcome import RunOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """Hints for a run that `train` was asked for by these options.

    `is_alone` if `train` started the ranks itself; `go_on_by` is the command that continues the
    run, if a script knows a better one.
    """

    directory: RunDirectory
    config: Path
    data: Path
    settings: Sequence[str]
    init_checkpoint: str | None
    is_alone: bool
    go_on_by: str | None

    def at_start(self) -> list[str]:
        """How to watch the run."""
        return _tool("watch it from another terminal", "watch", self.directory.run)

    def at_end(self, outcome: RunOutcome, *, is_saved: bool) -> list[str]:
        """What to do with the run: each a purpose and a command that works when typed."""
        if outcome.stopped_by is not None and is_saved:
            return [self.to_go_on()]
        lines = _tool("see it in a browser", "report", "page", self.directory.run)
        if outcome.status == "success" and is_saved:
            words = ("--checkpoint", self.directory.checkpoints, "The [MASK] was trained on text.")
            lines.append(f"to see what it fills in: {typed('fill', *words)}")
        return lines

    def to_go_on(self) -> str:
        """The command that continues the run from its last checkpoint."""
        if self.go_on_by is not None:
            return f"to go on: {self.go_on_by}"
        words: list[object] = ["train", "--config", self.config, "--data", self.data]
        words += [word for each in self.settings for word in ("--set", each)]
        if self.init_checkpoint:
            words += ["--init-checkpoint", self.init_checkpoint]
        words += ["--run-dir", self.directory.root, "--resume", "auto"]
        if self.directory.index:
            words += ["--run-index", self.directory.index]
        how = "" if self.is_alone else ", as its ranks were started before"
        return f"to go on{how}: {typed(*words)}"


def _tool(purpose: str, *words: object) -> list[str]:
    """A hint that names a command of the tools, if they are installed."""
    return [f"to {purpose}: {typed(*words)}"] if find_spec("bert_tools") else []
