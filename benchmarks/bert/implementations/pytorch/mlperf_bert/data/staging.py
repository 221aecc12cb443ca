"""The way of batches to the device: copied on a stream of their own, ahead of the step.

On a CPU nothing is copied and nothing is waited for; the calls are the same.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.step_plan import StepPlan

WAITS_FOR = "device"  # for distributed/failures.py


@dataclass(frozen=True, slots=True)
class StagedBatches:
    """Batches on the device, or on their way to it."""

    batches: tuple[UnpaddedBatch, ...]
    copied: torch.cuda.Event | None  # None: nothing to wait for


class Staging:
    """Sends batches to one device from the loader's thread; the loop's thread receives them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def thread_context(self) -> AbstractContextManager[object]:
        """What the loader's thread works in: CUDA calls go to this device and the side stream.

        A new thread's current device is GPU 0, whatever the rank's is.
        """
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def send(self, batches: tuple[UnpaddedBatch, ...], _plan: StepPlan) -> StagedBatches:
        """Queue the copies without waiting for them; called within `thread_context`."""
        if self._stream is None:
            return StagedBatches(batches, None)
        # From pageable memory a copy would make the host wait. torch notes on the stream when a
        # page-locked block was last read and hands it out again only after that.
        pinned = (
            batch if batch.input_ids.is_cuda or batch.input_ids.is_pinned() else batch.pin_memory()
            for batch in batches
        )
        on_device = tuple(batch.to(self._device) for batch in pinned)
        return StagedBatches(on_device, self._stream.record_event())

    def close(self) -> None:
        """Nothing to let go of."""

    def receive(self, staged: StagedBatches) -> tuple[UnpaddedBatch, ...]:
        """The batches, for work queued from now on on the current stream; the host does not wait.

        Called by the loop's thread.
        """
        if staged.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(staged.copied)

            def used_on_stream(block: Tensor) -> Tensor:
                # The memory belongs to the side stream, whose next copy must not get it while a
                # kernel queued here may still read it.
                block.record_stream(stream)
                return block

            for batch in staged.batches:
                batch.map_blocks(used_on_stream)
        return staged.batches
