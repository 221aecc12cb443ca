"""When a run is saved: beside the training, and at its end, together with how it ended."""

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from mlperf_bert.checkpoint.manifest import CheckpointState
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.config import RunConfig
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import on_rank_zero
from mlperf_bert.errors import CheckpointError
from mlperf_bert.eval_schedule import EvalSchedule, Evaluated
from mlperf_bert.health import Health
from mlperf_bert.metrics import Metrics
from mlperf_bert.progress import Reporter
from mlperf_bert.resume import Start
from mlperf_bert.run_directory import RunDirectory

AUTO_INTERVAL_S = 600.0
_SKIPPED = "skipped_in_a_row"
_BEST = "best_mlm_accuracy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a checkpoint says of its run that does not change."""

    seed: int
    vocabulary_sha256: str
    data_sha256: str


class Saving:
    """Begins checkpoints where they are due; every rank calls it at the same steps.

    Due is every `checkpoint.interval_steps`, counted from the last one that was begun, and where
    that is a number each evaluation that is the best so far. A result of an evaluation that is
    still on its way would be lost: until it is there, a checkpoint that is due waits.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        config: RunConfig,
        start: Start,
        identity: Identity,
        directory: RunDirectory,
        info: RankInfo,
        evaluation: EvalSchedule,
        metrics: Metrics,
        health: Health,
        reporter: Reporter,
    ) -> None:
        self._writer = writer
        self._config = config
        self._start = start
        self._identity = identity
        self._directory = directory
        self._info = info
        self._evaluation = evaluation
        self._metrics = metrics
        self._health = health
        self._reporter = reporter
        self._started = time.perf_counter()
        self._last_begun = start.step
        self._best = -1.0
        self._best_is_due = False

    def start(self) -> None:
        """Training begins now; the counters of a resumed run go on."""
        self._started = time.perf_counter()
        if self._start.state is None:
            self._metrics.start()
            return
        numbers = dict(self._start.state.numbers)
        self._best = numbers.pop(_BEST, -1.0)
        self._metrics.start(skipped_in_a_row=int(numbers.pop(_SKIPPED, 0)))
        self._health.restore(numbers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """After an error, give a checkpoint that is being written a moment."""
        if error is not None:
            self._writer.abandon()

    def after_step(
        self, step: int, samples: int, evaluated: Evaluated | None, step_s: float | None
    ) -> None:
        """Begin a checkpoint where one is due.

        `evaluated` is an evaluation whose result came now; `step_s` what a step takes, the same
        number on every rank, where it is known.
        """
        self._tell()
        accuracy = _accuracy_of(evaluated, samples)
        if accuracy is not None and accuracy > self._best:
            self._best, self._best_is_due = accuracy, True
        if not self._is_due(step, step_s) or self._evaluation.is_pending:
            return
        self._last_begun, self._best_is_due = step, False
        if not self._writer.begin(self._state(step, samples, accuracy)):
            self._reporter.line(
                f"checkpoint after step {step} passed over: the one before is still being written"
            )

    def at_end(
        self,
        status: Literal["success", "aborted"],
        step: int,
        samples: int,
        evaluated: Evaluated | None,
        stopped_by: str | None,
    ) -> None:
        """Save the run's end, and say how it ended. Raises CheckpointError where that fails."""
        with suppress(CheckpointError):  # told below, and the next one may have room
            self._writer.finish()
        self._tell()
        if self._config.checkpoint.save != "never":
            is_over = status == "success" or stopped_by is None
            accuracy = _accuracy_of(evaluated, samples)
            self._writer.begin(self._state(step, samples, accuracy, status if is_over else None))
            self._writer.finish()
            self._tell()
        outcome = {
            "status": status,
            "steps": step,
            "samples": samples,
            "seconds": self._seconds(),
            "mlm_accuracy": evaluated and evaluated.accuracy.mlm_accuracy,
            "stopped_by": None if status == "success" else stopped_by,
        }
        on_rank_zero(self._info, lambda: self._directory.write_outcome(outcome))

    def _tell(self) -> None:
        """Report what the writer has done."""
        for line in self._writer.lines():
            self._reporter.line(line)

    def _is_due(self, step: int, step_s: float | None) -> bool:
        interval = self._config.checkpoint.interval_steps
        if interval == 0:
            return False
        since = step - self._last_begun
        if interval == "auto":
            return step_s is not None and since >= math.ceil(AUTO_INTERVAL_S / max(step_s, 1e-9))
        return since >= interval or (self._best_is_due and since > 0)

    def _state(
        self,
        step: int,
        samples: int,
        accuracy: float | None,
        ended: Literal["success", "aborted"] | None = None,
    ) -> CheckpointState:
        numbers = {
            **self._health.state(),
            _SKIPPED: float(self._metrics.skipped_in_a_row()),
            _BEST: self._best,
        }
        identity = self._identity
        return CheckpointState(
            step=step,
            samples=samples,
            seed=identity.seed,
            mlm_accuracy=accuracy,
            vocabulary_sha256=identity.vocabulary_sha256,
            data_sha256=identity.data_sha256,
            world_size=self._info.world_size,
            ended=ended,
            seconds=self._seconds(),
            numbers={name: value for name, value in numbers.items() if math.isfinite(value)},
        )

    def _seconds(self) -> float:
        """Of training, in all parts of the run together."""
        before = 0.0 if self._start.state is None else self._start.state.seconds
        return before + time.perf_counter() - self._started


def _accuracy_of(evaluated: Evaluated | None, samples: int) -> float | None:
    """The accuracy of the weights after so many samples, where it is theirs."""
    if evaluated is None or evaluated.samples != samples:
        return None
    return evaluated.accuracy.mlm_accuracy
