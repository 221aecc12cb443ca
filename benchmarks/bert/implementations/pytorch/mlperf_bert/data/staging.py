"""The way of batches to the device: copied on a stream of their own, ahead of the step.

On a CPU nothing is copied and nothing is waited for; the calls are the same. A captured step has
its batches padded to a capacity first, then copied beside the last ones: there are two places for a
step's batches on the device, and the loader's thread fills one while the step that was last
received is computed from the other.
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

WAITS_FOR = "device"  # for distributed/failures.py
PLACES = 2
# Copies a block on the host, uint8 [bytes], into as much memory on the device: work queued from
# then on on the current stream finds it there.
Copy = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class StagedBatches:
    """Batches on the device, or on their way to it."""

    batches: tuple[UnpaddedBatch, ...]
    copied: torch.cuda.Event | None  # None: nothing to wait for


class Staging:
    """Sends batches to one device from the loader's thread; the loop's thread receives them.

    By `copy`, where one is given, on a CPU too; otherwise from page-locked memory.
    """

    def __init__(self, device: torch.device, copy: Copy | None = None) -> None:
        self._device = device
        self._copy = copy
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def thread_context(self) -> AbstractContextManager[object]:
        """What the loader's thread works in: CUDA calls go to this device and the side stream.

        A new thread's current device is GPU 0, whatever the rank's is.
        """
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def send(self, batches: tuple[UnpaddedBatch, ...], plan: StepPlan) -> StagedBatches:
        """Queue the copies without waiting for them; called within `thread_context`."""
        on_device = tuple(map(self._on_device, batches))
        copied = None if self._stream is None else self._stream.record_event()
        return StagedBatches(on_device, copied)

    def _on_device(self, batch: UnpaddedBatch) -> UnpaddedBatch:
        """The batch in memory of its own there."""
        if self._copy is not None:
            return batch.map_blocks(self._copied)
        if self._stream is None:
            return batch
        # From pageable memory a copy would make the host wait. torch notes on the stream when a
        # page-locked block was last read and hands it out again only after that.
        return (batch if batch.input_ids.is_pinned() else batch.pin_memory()).to(self._device)

    def _copied(self, block: Tensor, memory: Tensor | None = None) -> Tensor:
        """The block in the first bytes of `memory` on the device; None: in memory of its own."""
        part = torch.empty_like(block, device=self._device) if memory is None else memory
        part = part[: block.numel()]
        if self._copy is None:
            part.copy_(block, non_blocking=True)
        else:
            self._copy(block, part)
        return part

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


class CapacityStaging(Staging):
    """Pads what it sends. Batches of a step that no capacity holds go their way unpadded.

    On a CPU a padded batch is handed over as it is, or copied: nothing is waited for.

    Args:
        shapes: of the capacities, the smallest first.
        forwards: batches of a step.
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
        """Pad them and queue their copies; waits while both places are in use."""
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
        padded = (pad(batch, shape, pin_memory=self._copy is None) for batch in batches)
        return place.fill(padded, self._copied)

    def receive(self, staged: StagedBatches) -> tuple[UnpaddedBatch, ...]:
        """As `Staging.receive`; the batches received before may be overwritten from now on.

        What was queued on the current stream until now still reads them first.
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
        """Let a thread go that waits for a place; it is given no batches."""
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
        """Copy batches here, when what was queued for the ones before has read those."""
        torch.cuda.current_stream().wait_event(self.computed)
        there = tuple(
            batch.map_blocks(partial(copied, memory=memory))
            for batch, memory in zip(padded, self._on_device, strict=True)
        )
        self._staged = StagedBatches(there, torch.cuda.current_stream().record_event())
        return self._staged

    def holds(self, staged: StagedBatches) -> bool:
        """Whether these are the batches that lie here."""
        return staged is self._staged
