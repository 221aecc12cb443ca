"""The captured step: a whole update on tensors that stay where they are, one graph a capacity.

Forward, backward, all-reduce, clipping, schedule and update of every accumulation step are captured
in the untimed init phase. A replay reads static inputs, which the batches of its step overwrite.
Without CUDA the same object runs the eager step over the same static inputs.
"""

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Self

import torch

from mlperf_bert.data.batch import UnpaddedBatch, blank
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.run.metrics import StepResult
from mlperf_bert.signals.whereabouts import Heartbeat, end_process
from mlperf_bert.step.eager import EagerStep, MakeBatch
from mlperf_bert.step.replay import Replay


def use_capturable_stream(device: torch.device) -> None:
    """Have this thread work on a stream of its own: the default one cannot be captured.

    Gradients are accumulated on the stream on which a parameter was first used, or on which
    DistributedDataParallel was built: so this comes before all else.
    """
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class CapturedStep:
    """An update when called, as EagerStep: batches padded to one of `shapes` are replayed.

    Batches that are not padded run eagerly. On all ranks the same steps must be replayed. On CUDA
    everything, from the building of the model on, happens after `use_capturable_stream`.

    Args:
        eager: what is captured.
        shapes: of the capacities, the smallest first.
        forwards: batches of an update.
        rank: named where a step hangs.
        warm_up_calls: of each shape before its capture.
        hang_timeout_s: after which a step that has not ended ends the process.
    """

    def __init__(
        self,
        eager: EagerStep,
        shapes: tuple[StaticShape, ...],
        *,
        forwards: int,
        device: torch.device,
        rank: int,
        warm_up_calls: int,
        hang_timeout_s: float,
    ) -> None:
        self._eager = eager
        self.shapes = shapes
        self._forwards = forwards
        self._device = device
        self._warm_up_calls = warm_up_calls
        self._captured: dict[StaticShape | None, tuple[StaticInputs, Replay[StepResult]]] = {}
        self._heartbeat = Heartbeat(
            hang_timeout_s,
            lambda step: end_process(
                f"rank {rank} on {socket.gethostname()}: step {step} has not ended, "
                f"{hang_timeout_s:g} s (run.hang_timeout_s) after the one before; "
                "another rank may be gone, or a kernel hangs"
            ),
        )

    def prepare(self, make_batch: MakeBatch) -> None:
        """Capture an update of each shape, on made-up batches: weights and moments change."""
        is_cuda = self._device.type == "cuda"
        static = [StaticInputs(make_batch(s), self._forwards, self._device) for s in self.shapes]
        # All warm-ups first: they cannot use the memory that the first capture keeps to itself.
        # The largest first, so that the others find memory.
        for inputs in reversed(static):
            for _ in range(self._warm_up_calls if is_cuda else 0):
                self._update_of(inputs)()
        pool = torch.cuda.graph_pool_handle() if is_cuda else None
        stream = torch.cuda.current_stream(self._device) if is_cuda else None
        for inputs in reversed(static):
            update = self._update_of(inputs)
            replay = Replay(update, self._device, warm_up_calls=0, stream=stream, pool=pool)
            self._captured[inputs.batches[0].shape] = inputs, replay

    def _update_of(self, inputs: "StaticInputs") -> Callable[[], StepResult]:
        def update() -> StepResult:
            result = self._eager.update(inputs.batches)
            self._eager.optimizer.settle()  # weights of other ranks: within the graph
            return result

        return update

    def __call__(self, step: int, micro_batches: tuple[UnpaddedBatch, ...]) -> StepResult:
        """Update once; the result is overwritten by the next call."""
        ending = _Ending(self._device)
        self._heartbeat.watch(step, ending.is_over)
        captured = self._captured.get(micro_batches[0].shape)
        if captured is None:
            result = self._eager(step, micro_batches)
        else:
            inputs, replay = captured
            self._eager.optimizer.settle()  # after an eager step, whose weights may still travel
            self._eager.number.fill_(step)
            inputs.overwrite(micro_batches)
            result = replay()
        ending.is_queued()
        return result

    def __enter__(self) -> Self:
        self._heartbeat.__enter__()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Free the graphs, before the process group goes that their collectives belong to.

        Not after an error: the device may never be done with them.
        """
        if kind is None:
            for _inputs, replay in self._captured.values():
                replay.close()
            self._captured.clear()
        self._heartbeat.__exit__()  # last: the device may hang until then


class _Ending:
    """Whether the device has done all that a step queued."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queued = False  # on a CPU: and done
        self._event: torch.cuda.Event | None = None

    def is_queued(self) -> None:
        """Say that the step has queued everything."""
        if self._device.type == "cuda":
            self._event = torch.cuda.current_stream(self._device).record_event()
        else:
            self._queued = True

    def is_over(self) -> bool:
        """Without waiting; called by another thread."""
        if self._event is None:
            return self._queued
        with torch.cuda.device(self._device):  # a new thread's is GPU 0, whatever the rank's is
            return bool(self._event.query())  # type: ignore[no-untyped-call]


class StaticInputs:
    """One padded batch a forward, in memory of its own that stays where it is."""

    def __init__(self, batch: UnpaddedBatch, forwards: int, device: torch.device) -> None:
        assert batch.shape is not None
        self.batches = tuple(blank(batch.shape, device) for _ in range(forwards))
        self.overwrite((batch,) * forwards)

    def overwrite(self, batches: tuple[UnpaddedBatch, ...]) -> None:
        """Copy batches of this shape in; on CUDA, on the current stream."""
        for static, batch in zip(self.batches, batches, strict=True):
            static.block.copy_(batch.block, non_blocking=True)
        # Host copies of lengths matter where the step is not captured.
        self.batches = tuple(
            replace(static, lengths=batch.lengths, masked_counts=batch.masked_counts)
            for static, batch in zip(self.batches, batches, strict=True)
        )


# What the loop calls. `shapes` are what batches are padded to, the smallest first.
Step = EagerStep | CapturedStep
