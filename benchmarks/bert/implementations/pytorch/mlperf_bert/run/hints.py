"""Hints about which command to type next for a run. This file is imported before torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mlperf_bert.errors import UserError, typed
from mlperf_bert.run.outcome import RunOutcome
from mlperf_bert.run.paths import RunPaths


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """The hints for a run that was started with these options of `train`.

    `resume` is the option `--resume`. `is_alone` is True if `train` started the ranks itself.
    `script_command` is the command that resumes the run, or None if no script or other command
    started `train`.
    """

    paths: RunPaths
    config: Path
    data: Path
    settings: Sequence[str]
    init_checkpoint: str | None
    resume: str
    is_alone: bool
    script_command: str | None

    def at_start(self) -> list[str]:
        """Return hints about how to watch the run."""
        return _tool("watch the run from another terminal", "watch", self.paths.run)

    def at_end(self, outcome: RunOutcome, *, is_saved: bool) -> list[str]:
        """Return hints about what to do next, each with a purpose and a command to type."""
        if outcome.stopped_by is not None and is_saved:
            return [self.to_resume()]
        lines = _tool("see the run in a browser", "report", "page", self.paths.run)
        if outcome.status == "success" and is_saved:
            words = ("--checkpoint", self.paths.checkpoints, "The [MASK] was trained on text.")
            lines.append(f"to see what the model fills in: {typed('fill', *words)}")
        return lines

    def to_resume(self, purpose: str = "resume", *, is_new: bool = False) -> str:
        """Return a hint with the command that resumes the run from its last checkpoint.

        If `is_new` is True, the run has no directory yet, and the command of `train` starts it as
        before. A script prints its own hint then.
        """
        if self.script_command is not None:
            return f"to {purpose}: {self.script_command}"
        words: list[object] = ["train", "--config", self.config, "--data", self.data]
        words += [word for each in self.settings for word in ("--set", each)]
        if self.init_checkpoint:
            words += ["--init-checkpoint", self.init_checkpoint]
        resume = self.resume if is_new and self.resume != "none" else "auto"
        words += ["--run-dir", self.paths.root, "--resume", resume]
        if self.paths.index:
            words += ["--run-index", self.paths.index]
        how = "" if self.is_alone else " with the same launcher"
        return f"to {purpose}{how}: {typed(*words)}"

    def before_first_step(self) -> str:
        """Return a hint about how to continue a run that stopped before its first step."""
        try:
            is_new, has_checkpoint = not self.paths.exists, self.paths.has_checkpoint
        except UserError:
            is_new, has_checkpoint = False, False
        return self.to_resume("resume" if has_checkpoint else "start again", is_new=is_new)


def _tool(purpose: str, *words: object) -> list[str]:
    """Return a list of one hint for a command of the tools, or [] if they are not installed."""
    return [f"to {purpose}: {typed(*words)}"] if find_spec("bert_tools") else []
