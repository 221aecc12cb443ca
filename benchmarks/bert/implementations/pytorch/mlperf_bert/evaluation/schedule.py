"""Schedule of evaluations: in turn with training, or beside it on a copy of the weights.

Both write MLPerf's records of an evaluation, with the number of samples that the evaluated weights
were trained on.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mlperf_bert.evaluation.evaluate import Accuracy, Evaluator
from mlperf_bert.model.bert import BertForPretraining
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


class Beside(InTurn):
    """Evaluation of a copy of the weights on a stream of its own while training goes on.

    The result is read after training on as many more samples as the held-out set has: about three
    times the evaluation's work, so it is ready. That step does not depend on a device's speed, so
    it is the same on all ranks and in every run of the same config. On a CPU the evaluation is done
    at once, and its result is returned at that same step.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        model: BertForPretraining,
        snapshot: BertForPretraining,
        settle: Callable[[], None],
        log: MlperfLog,
    ) -> None:
        """Copy `model` to `snapshot`, of the same shape and dtype; `settle` as in InTurn."""
        super().__init__(evaluator, snapshot, settle, log)
        self._delay = evaluator.num_samples
        self._to, self._from = tuple(snapshot.parameters()), tuple(model.parameters())
        self._scales = (snapshot.fp8_state(), model.fp8_state())
        self._stream: torch.cuda.Stream | None = None
        if self._to[0].is_cuda:
            self._stream = torch.cuda.Stream(self._to[0].device)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def begin(self, samples: int) -> float:
        """See InTurn. The previous evaluation's result must have been read."""
        assert self._pending is None
        started = time.perf_counter()
        self._log.eval_start(samples)
        self._settle()
        torch._foreach_copy_(self._to, self._from)
        to, source = self._scales
        for name, scales in to.items():
            scales.copy_(source[name])
        with self._on_own_stream():
            counts = self._evaluator.count(self._evaluated)
            event = None
            if self._stream is not None:
                counts = torch.empty_like(counts, device="cpu", pin_memory=True).copy_(
                    counts, non_blocking=True
                )
                event = self._stream.record_event()
        seconds = time.perf_counter() - started
        self._pending = samples, partial(self._end, samples, counts, event, seconds)
        return seconds

    def _end(
        self, samples: int, counts: Tensor, event: torch.cuda.Event | None, seconds: float
    ) -> Evaluated:
        """The result of `counts`, int64 [4], which reach the host with `event`."""
        started = time.perf_counter()
        if event is not None:
            event.synchronize()  # host sync: the stop decision is the host's
        # Here, at the same step on all ranks: an all-reduce behind the evaluation would delay
        # training's own.
        accuracy = self._evaluator.accuracy(counts)
        self._log_result(samples, accuracy)
        return Evaluated(samples, accuracy, seconds + time.perf_counter() - started)

    def _on_own_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)
