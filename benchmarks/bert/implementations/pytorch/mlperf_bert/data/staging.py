"""Transfer of batches to the device, on a stream of their own, ahead of the step.

On a CPU the calls are the same, but nothing is copied and nothing waits. For a captured step,
batches are padded to a capacity and then copied into one of two places on the device: the loader's
thread fills one while the latest received step is computed from the other.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mlperf_bert.data.balance import StepPlan
from mlperf_bert.data.batch import UnpaddedBatch, blank, pad
from mlperf_bert.data.capacity import StaticShape, shape_of

PLACES = 2
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

    It sends by `copy` if given, on a CPU too; otherwise from page-locked memory.
    """

    def __init__(self, device: torch.device, copy: Copy | None = None) -> None:
        self._device = device
        self._copy = copy
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
        on_device = tuple(map(self._on_device, batches))
        copied = None if self._stream is None else self._stream.record_event()
        return StagedBatches(on_device, copied)

    def _on_device(self, batch: UnpaddedBatch) -> UnpaddedBatch:
        """The batch in device memory of its own."""
        if self._copy is not None:
            return batch.map_blocks(self._copied)
        if self._stream is None:
            return batch
        # A copy from pageable memory would make the host wait. torch records on the stream when a
        # page-locked block was last read and reuses it only after that.
        return (batch if batch.input_ids.is_pinned() else batch.pin_memory()).to(self._device)

    def _copied(self, block: Tensor, memory: Tensor | None = None) -> Tensor:
        """The block in the first bytes of `memory` on the device, or in new memory if None."""
        part = torch.empty_like(block, device=self._device) if memory is None else memory
        part = part[: block.numel()]
        if self._copy is None:
            part.copy_(block, non_blocking=True)
        else:
            self._copy(block, part)
        return part

    def close(self) -> None:
        """Do nothing: no resources are held."""

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


class CapacityStaging(Staging):
    """A sender that pads batches; those of a step that no capacity holds stay unpadded.

    On a CPU a padded batch is passed on or copied, without waiting.

    Args:
        shapes: shapes of the capacities, the smallest first.
        forwards: batches a step.
    """

    def __init__(
        self,
        shapes: tuple[StaticShape, ...],
        forwards: int,
        device: torch.device,
        copy: Copy | None = None,
    ) -> None:
        super().__init__(device, copy)
        self._shapes = shapes
        num_bytes = max(blank(shape).block.numel() for shape in shapes)
        self._places = [
            None if self._stream is None else _Place(num_bytes, forwards, device)
            for _ in range(PLACES)
        ]
        self._free = threading.Semaphore(PLACES)
        self._next = 0
        self._computed_from: _Place | None = None
        self._is_over = False

    def send(self, batches: tuple[UnpaddedBatch, ...], plan: StepPlan) -> StagedBatches:
        """Pad the batches and queue their copies; wait while both places are in use."""
        shape = shape_of(plan, self._shapes)
        if shape is None:
            return super().send(batches, plan)
        place = self._places[self._next]
        if place is None:
            return super().send(tuple(pad(batch, shape) for batch in batches), plan)
        self._free.acquire()
        if self._is_over:
            return StagedBatches((), None)
        self._next = (self._next + 1) % PLACES
        padded = (pad(batch, shape) for batch in batches)
        return place.fill(padded, self._copied)

    def receive(self, staged: StagedBatches) -> tuple[UnpaddedBatch, ...]:
        """See `Staging.receive`; the batches received before may be overwritten from now on.

        Work already queued on the current stream still reads them first.
        """
        if self._computed_from is not None:
            self._computed_from.computed.record()
            self._free.release()
        place = next((each for each in self._places if each and each.holds(staged)), None)
        self._computed_from = place
        if place is None:
            return super().receive(staged)
        assert staged.copied is not None
        torch.cuda.current_stream().wait_event(staged.copied)
        return staged.batches

    def close(self) -> None:
        """Release a thread that waits for a place; it gets no batches."""
        self._is_over = True
        self._free.release()


class _Place:
    """Memory of one step's batches: page-locked on the host, and on the device."""

    def __init__(self, num_bytes: int, forwards: int, device: torch.device) -> None:
        self._on_device = [
            torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(forwards)
        ]
        self._staged: StagedBatches | None = None
        self.computed = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fill(self, padded: Iterable[UnpaddedBatch], copied: Callable[..., Tensor]) -> StagedBatches:
        """Copy batches here, after work queued for the previous ones has read those."""
        torch.cuda.current_stream().wait_event(self.computed)
        there = tuple(
            batch.map_blocks(partial(copied, memory=memory))
            for batch, memory in zip(padded, self._on_device, strict=True)
        )
        self._staged = StagedBatches(there, torch.cuda.current_stream().record_event())
        return self._staged

    def holds(self, staged: StagedBatches) -> bool:
        """True if these batches lie here."""
        return staged is self._staged
