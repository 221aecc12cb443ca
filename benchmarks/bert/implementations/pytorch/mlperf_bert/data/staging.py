"""Transfer of batches to the device, on a stream of their own, ahead of the step.

On a CPU the calls are the same, but nothing is copied and nothing waits. For a captured step,
batches are padded to a capacity first.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from mlperf_bert.data.balance import StepPlan
from mlperf_bert.data.batch import UnpaddedBatch, pad
from mlperf_bert.data.capacity import StaticShape, shape_of

# Copies a host block, uint8 [bytes], into as much device memory; work queued later on the current
# stream sees it.
Copy = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class StagedBatches:
    """Batches on the device, or on their way to it."""

    batches: tuple[UnpaddedBatch, ...]
    copied: torch.cuda.Event | None  # None: nothing to wait for


class Staging:
    """A sender of batches to one device in the loader's thread; the loop's thread receives them.

    Batches of a step that no capacity holds stay unpadded.

    Args:
        device: where the batches go.
        copy: sends them, on a CPU too; if None, they travel from page-locked memory.
        shapes: shapes of the capacities, the smallest first; empty if no step is captured.
    """

    def __init__(
        self,
        device: torch.device,
        copy: Copy | None = None,
        shapes: tuple[StaticShape, ...] = (),
    ) -> None:
        self._device = device
        self._copy = copy
        self._shapes = shapes
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def thread_context(self) -> AbstractContextManager[object]:
        """The loader thread's context: CUDA calls go to this device and the side stream.

        A new thread starts on GPU 0, whatever the rank's GPU.
        """
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def send(self, batches: tuple[UnpaddedBatch, ...], plan: StepPlan) -> StagedBatches:
        """Queue the copies without waiting for them; called within `thread_context`."""
        shape = shape_of(plan, self._shapes)
        if shape is not None:
            batches = tuple(pad(batch, shape) for batch in batches)
        on_device = tuple(map(self._on_device, batches))
        copied = None if self._stream is None else self._stream.record_event()
        return StagedBatches(on_device, copied)

    def _on_device(self, batch: UnpaddedBatch) -> UnpaddedBatch:
        """The batch in device memory of its own."""
        if self._copy is not None:
            return batch.map_blocks(self._copied)
        if self._stream is None:
            return batch
        return batch.pin_memory().to(self._device)  # from pageable memory the host would wait

    def _copied(self, block: Tensor) -> Tensor:
        """The block in new memory on the device, by `copy`."""
        assert self._copy is not None
        memory = torch.empty_like(block, device=self._device)
        self._copy(block, memory)
        return memory

    def receive(self, staged: StagedBatches) -> tuple[UnpaddedBatch, ...]:
        """The batches, ready for work queued later on the current stream; the host does not wait.

        Called by the loop's thread.
        """
        if staged.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(staged.copied)

            def used_on_stream(block: Tensor) -> Tensor:
                # The memory belongs to the side stream; its next copy must not get it while a
                # kernel queued here may still read it.
                block.record_stream(stream)
                return block

            for batch in staged.batches:
                batch.map_blocks(used_on_stream)
        return staged.batches
