"""When an evaluation runs, and from when on its result counts: in turn with training, or beside it.

Both write MLPerf's records of an evaluation, under the number of samples trained into the weights
that are evaluated.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mlperf_bert.evaluation.evaluate import Accuracy, Evaluator
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.run.mlperf_log import MlperfLog


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The accuracy of the weights after so many samples."""

    samples: int
    accuracy: Accuracy
    seconds: float  # for which the loop stood still, to begin it and to wait for it


class EvalSchedule(Protocol):
    """What the loop calls; every rank does so at the same steps."""

    def prepare(self) -> None:
        """Capture what will be replayed, in the untimed init phase."""

    @property
    def is_pending(self) -> bool:
        """Whether an evaluation was begun whose result was not asked for."""

    def begin(self, samples: int) -> float:
        """Evaluate the weights as they are, after `samples` trained sequences.

        Returns the seconds for which the loop stood still.
        """

    def poll(self, samples: int, *, wait: bool) -> Evaluated | None:
        """The result of the evaluation begun last, once; None where there is none or not yet.

        Args:
            samples: trained by now.
            wait: until it is there, if one was begun.
        """


class InTurn:
    """Training stands still for an evaluation; its result is there when `begin` returns."""

    def __init__(
        self, evaluator: Evaluator, model: nn.Module, settle: Callable[[], None], log: MlperfLog
    ) -> None:
        """Evaluate `model`, when `settle` has returned: then all its weights are in place."""
        self._evaluator = evaluator
        self._model = model
        self._settle = settle
        self._log = log
        self._done: Evaluated | None = None

    def prepare(self) -> None:
        """See EvalSchedule."""
        self._evaluator.prepare(self._model)

    @property
    def is_pending(self) -> bool:
        """See EvalSchedule."""
        return self._done is not None

    def begin(self, samples: int) -> float:
        """See EvalSchedule."""
        parameter = next(self._model.parameters())
        if parameter.is_cuda:  # training's queue must not count as evaluation
            torch.cuda.synchronize(parameter.device)
        started = time.perf_counter()
        self._log.eval_start(samples)
        self._settle()
        accuracy = self._evaluator(self._model)
        _log_result(self._log, samples, accuracy)
        seconds = time.perf_counter() - started
        self._done = Evaluated(samples, accuracy, seconds)
        return seconds

    def poll(self, samples: int, *, wait: bool) -> Evaluated | None:
        """See EvalSchedule."""
        done, self._done = self._done, None
        return done


@dataclass(frozen=True, slots=True)
class _Pending:
    """An evaluation on its way."""

    samples: int
    counts: Tensor  # on the host, int64 [4]
    event: torch.cuda.Event | None  # after which they are there; None: now
    seconds: float  # that it took to begin


class Beside:
    """A copy of the weights is evaluated on a stream of its own while training goes on.

    The result is asked for when as many samples more were trained as the held-out set has: about
    three times the work of the evaluation, so it is there. That step does not depend on when a
    device is done, and so is the same on all ranks and in every run of the same config. On a CPU
    the evaluation is done at once, and its result handed over at that same step.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        model: BertForPretraining,
        snapshot: BertForPretraining,
        settle: Callable[[], None],
        log: MlperfLog,
    ) -> None:
        """Copy `model` to `snapshot`, of the same shape and dtype; `settle` as of InTurn."""
        self._evaluator = evaluator
        self._log = log
        self._settle = settle
        self._snapshot = snapshot
        self._to, self._from = tuple(snapshot.parameters()), tuple(model.parameters())
        self._scales = (snapshot.fp8_state(), model.fp8_state())
        self._stream: torch.cuda.Stream | None = None
        if self._to[0].is_cuda:
            self._stream = torch.cuda.Stream(self._to[0].device)  # type: ignore[no-untyped-call]
        self._pending: _Pending | None = None

    def prepare(self) -> None:
        """See EvalSchedule."""
        self._evaluator.prepare(self._snapshot)

    @property
    def is_pending(self) -> bool:
        """See EvalSchedule."""
        return self._pending is not None

    @torch.no_grad()
    def begin(self, samples: int) -> float:
        """See EvalSchedule. The result of the evaluation before must have been asked for."""
        assert self._pending is None
        started = time.perf_counter()
        self._log.eval_start(samples)
        self._settle()
        torch._foreach_copy_(self._to, self._from)
        to, source = self._scales
        for name, scales in to.items():
            scales.copy_(source[name])
        with self._on_own_stream():
            counts = self._evaluator.count(self._snapshot)
            event = None
            if self._stream is not None:
                counts = torch.empty_like(counts, device="cpu", pin_memory=True).copy_(
                    counts, non_blocking=True
                )
                event = self._stream.record_event()
        seconds = time.perf_counter() - started
        self._pending = _Pending(samples, counts, event, seconds)
        return seconds

    def poll(self, samples: int, *, wait: bool) -> Evaluated | None:
        """See EvalSchedule."""
        pending = self._pending
        if pending is None:
            return None
        if not wait and samples - pending.samples < self._evaluator.num_samples:
            return None
        self._pending = None
        started = time.perf_counter()
        if pending.event is not None:
            pending.event.synchronize()  # host sync: the stop decision is the host's
        # Here, at the same step on all ranks: an all-reduce behind the evaluation would hold up
        # training's own.
        accuracy = self._evaluator.accuracy(pending.counts)
        _log_result(self._log, pending.samples, accuracy)
        seconds = pending.seconds + time.perf_counter() - started
        return Evaluated(pending.samples, accuracy, seconds)

    def _on_own_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)


def _log_result(log: MlperfLog, samples: int, accuracy: Accuracy) -> None:
    log.eval_accuracy(samples, accuracy.mlm_accuracy)
    log.eval_stop(samples)
