"""Schedule of evaluations: in turn with training.

It writes MLPerf's records of an evaluation, with the number of samples that the evaluated weights
were trained on.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from mlperf_bert.evaluation.evaluate import Accuracy, Evaluator
from mlperf_bert.run.mlperf_log import MlperfLog
from mlperf_bert.step.replay import finish_queued_work


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The accuracy of the weights after a number of samples."""

    samples: int
    accuracy: Accuracy
    seconds: float  # time for which the loop stood still, to begin it and to wait for it


class InTurn:
    """Evaluation while training stands still; the result is ready when `begin` returns."""

    def __init__(
        self, evaluator: Evaluator, model: nn.Module, settle: Callable[[], None], log: MlperfLog
    ) -> None:
        """Evaluate `model` after `settle` has returned, which brings all its weights into place."""
        self._evaluator = evaluator
        self._evaluated = model
        self._settle = settle
        self._log = log
        self._delay = 0  # samples to train before the result is read
        # Samples of the evaluation in progress, and the function that ends it.
        self._pending: tuple[int, Callable[[], Evaluated]] | None = None

    def prepare(self) -> None:
        """Capture the evaluation, in the untimed init phase."""
        self._evaluator.prepare(self._evaluated)

    def begin(self, samples: int) -> float:
        """Evaluate the current weights, after `samples` trained sequences.

        Returns the seconds for which the loop stood still. Every rank calls it at the same steps.
        """
        finish_queued_work(next(self._evaluated.parameters()).device)  # not part of the evaluation
        started = time.perf_counter()
        self._log.eval_start(samples)
        self._settle()
        accuracy = self._evaluator(self._evaluated)
        self._log_result(samples, accuracy)
        done = Evaluated(samples, accuracy, time.perf_counter() - started)
        self._pending = samples, lambda: done
        return done.seconds

    def poll(self, samples: int, *, wait: bool) -> Evaluated | None:
        """The result of the latest evaluation, given once; None if there is none, or not yet.

        Args:
            samples: trained by now.
            wait: wait for the result if an evaluation was begun.
        """
        if self._pending is None or not (wait or samples - self._pending[0] >= self._delay):
            return None
        (_, end), self._pending = self._pending, None
        return end()

    def _log_result(self, samples: int, accuracy: Accuracy) -> None:
        self._log.eval_accuracy(samples, accuracy.mlm_accuracy)
        self._log.eval_stop(samples)
