"""Save checkpoints during training, and the last checkpoint together with the run's outcome."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from mlperf_bert.checkpoint.manifest import CheckpointState
from mlperf_bert.checkpoint.resume import Start
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.errors import CheckpointError
from mlperf_bert.evaluation.evaluate import Evaluated
from mlperf_bert.run.metrics import Metrics
from mlperf_bert.run.outcome import RunOutcome, Status

if TYPE_CHECKING:
    from mlperf_bert.run.console import Reporter

AUTO_INTERVAL_S = 600.0


@dataclass(kw_only=True, eq=False, repr=False)
class Saving:
    """A context manager that saves checkpoints when they are due.

    All ranks call its methods at the same steps. A checkpoint is due `checkpoint.interval_steps`
    after the previous one. The metrics interval must end there too, so that a resumed run writes
    the same records as an uninterrupted one.
    """

    config: RunConfig
    identity: CheckpointState  # has the constant fields of the run's state
    start_of_run: Start
    writer: CheckpointWriter
    metrics: Metrics
    reporter: "Reporter"
    write_outcome: Callable[[RunOutcome], None]  # called by every rank

    def __post_init__(self) -> None:
        self._last_saved = self.start_of_run.step

    def prepare(self) -> None:
        """Allocate the memory for checkpoints. Call this during the untimed initialization."""
        if self.config.checkpoint.interval_steps not in (0, "never"):
            self.writer.prepare()

    def start(self) -> None:
        """Start the clock and the counters. A resumed run starts from its checkpoint's values."""
        self._started = time.perf_counter()
        state = self.start_of_run.state
        self.metrics.start(0 if state is None else state.skipped_in_a_row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """If the body raised an error, wait a few seconds for an unfinished checkpoint."""
        if kind is not None:
            self.writer.leave()

    def is_due(self, step: int, step_s: float | None) -> bool:
        """Return True if a checkpoint is due after `step`.

        `step_s` is the duration of a step in seconds, equal on all ranks, or None if it is not
        known yet.
        """
        steps = self.config.checkpoint.interval_steps
        if steps == "never" or steps == 0:
            return False
        if steps == "auto":
            if step_s is None:
                return False
            interval = math.ceil(AUTO_INTERVAL_S / max(step_s, 1e-9))
        else:
            interval = steps
        return step - self._last_saved >= interval

    def after_step(
        self, step: int, samples: int, evaluated: Evaluated | None, *, is_due: bool
    ) -> None:
        """Report what the writer has done, and start to save a checkpoint if one is due.

        `evaluated` is the result of an evaluation that has just finished, or None.
        """
        self._report()
        if not is_due:
            return
        if not self.writer.begin(self._state(step, samples, _accuracy_of(evaluated, samples))):
            self.reporter.line(
                f"skipped the checkpoint after step {step} because the previous one is still being "
                "written; increase checkpoint.interval_steps, or write to a faster disk"
            )
        self._last_saved = step

    def at_end(
        self,
        status: Status,
        step: int,
        samples: int,
        evaluated: Evaluated | None,
        stopped_by: str | None,
    ) -> RunOutcome:
        """Save the last checkpoint of the run, write the run's outcome, and return that outcome.

        Raises CheckpointError if the checkpoint could not be saved. The run then has no outcome,
        and can be resumed from its last complete checkpoint.
        """
        is_over = status == "success" or stopped_by is None
        seconds = self._seconds()  # without the time to write the last checkpoint
        self._save_end(step, samples, evaluated, status if is_over else None)
        outcome = RunOutcome(
            status=status,
            steps=step,
            samples=samples,
            seconds=seconds,
            mlm_accuracy=None if evaluated is None else evaluated.accuracy.mlm_accuracy,
            stopped_by=None if is_over else stopped_by,
        )
        self.write_outcome(outcome)
        return outcome

    def _save_end(
        self,
        step: int,
        samples: int,
        evaluated: Evaluated | None,
        ended: Status | None,
    ) -> None:
        try:
            self.writer.finish()
        except CheckpointError:
            pass  # it is reported below, and the next one may succeed
        finally:
            self._report()
        self.writer.check_run_directory()
        if self.config.checkpoint.interval_steps == "never":
            self.reporter.line("saved no checkpoint because checkpoint.interval_steps is 'never'")
            return
        state = self._state(step, samples, _accuracy_of(evaluated, samples), ended)
        try:
            if not self.writer.begin(state):  # one that timed out is being written after all
                self.writer.finish()
                self.writer.begin(state)
            self.writer.finish()
        finally:
            self._report()

    def _report(self) -> None:
        """Print the messages of the checkpoint writer."""
        for line in self.writer.lines(check=self.metrics.interval_is_full):
            self.reporter.line(line)

    def _state(
        self,
        step: int,
        samples: int,
        accuracy: float | None,
        ended: Status | None = None,
    ) -> CheckpointState:
        return replace(
            self.identity,
            step=step,
            samples=samples,
            mlm_accuracy=accuracy,
            ended=ended,
            seconds=self._seconds(),
            skipped_in_a_row=self.metrics.skipped_in_a_row(),
        )

    def _seconds(self) -> float:
        """Return the training time in seconds, summed over all attempts of the run."""
        before = 0.0 if self.start_of_run.state is None else self.start_of_run.state.seconds
        return before + time.perf_counter() - self._started


def _accuracy_of(evaluated: Evaluated | None, samples: int) -> float | None:
    """Return the accuracy of an evaluation after exactly `samples` sequences, or None."""
    if evaluated is None or evaluated.samples != samples:
        return None
    return evaluated.accuracy.mlm_accuracy
