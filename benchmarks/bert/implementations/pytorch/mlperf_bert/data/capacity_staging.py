"""The way of batches to a captured step: padded to a capacity, then copied beside the last ones.

There are two places for a step's batches on the device. The loader's thread fills one on a stream
of its own while the step that was last received is computed from the other.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from mlperf_bert.data.batch import UnpaddedBatch, empty_batch
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.choose_capacity import shape_of
from mlperf_bert.data.padding import pad
from mlperf_bert.data.staging import StagedBatches, Staging
from mlperf_bert.data.step_plan import StepPlan

WAITS_FOR = "device"  # for distributed/failures.py
PLACES = 2


class CapacityStaging:
    """A `Staging` that pads. Batches of a step that no capacity holds go their way unpadded.

    On a CPU a padded batch is handed over as it is: nothing is copied, nothing is waited for.

    Args:
        shapes: of the capacities, the smallest first.
        forwards: batches of a step.
    """

    def __init__(
        self, shapes: tuple[StaticShape, ...], forwards: int, device: torch.device
    ) -> None:
        self._shapes = shapes
        self._unpadded = Staging(device)
        self._on_cuda = device.type == "cuda"
        num_bytes = max(_num_bytes(shape) for shape in shapes)
        self._places = [
            _Place(num_bytes, forwards, device) if self._on_cuda else None for _ in range(PLACES)
        ]
        self._free = threading.Semaphore(PLACES)
        self._next = 0
        self._computed_from: _Place | None = None
        self._is_over = False

    def thread_context(self) -> AbstractContextManager[object]:
        """As `Staging.thread_context`."""
        return self._unpadded.thread_context() if self._on_cuda else nullcontext()

    def send(self, batches: tuple[UnpaddedBatch, ...], plan: StepPlan) -> StagedBatches:
        """Pad them and queue their copies; waits while both places are in use."""
        shape = shape_of(plan, self._shapes)
        if shape is None:
            return self._unpadded.send(batches, plan)
        place = self._places[self._next]
        if place is None:
            return StagedBatches(tuple(pad(batch, shape) for batch in batches), None)
        self._free.acquire()
        if self._is_over:
            return StagedBatches((), None)
        self._next = (self._next + 1) % PLACES
        return place.fill(batches, shape)

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
            return self._unpadded.receive(staged)
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

    def fill(self, batches: tuple[UnpaddedBatch, ...], shape: StaticShape) -> StagedBatches:
        """Copy padded batches here, when what was queued for the ones before has read those."""
        torch.cuda.current_stream().wait_event(self.computed)
        there = tuple(
            pad(batch, shape, pin_memory=True).map_blocks(partial(_copied, memory=memory))
            for batch, memory in zip(batches, self._on_device, strict=True)
        )
        self._staged = StagedBatches(there, torch.cuda.current_stream().record_event())
        return self._staged

    def holds(self, staged: StagedBatches) -> bool:
        """Whether these are the batches that lie here."""
        return staged is self._staged


def _copied(block: Tensor, memory: Tensor) -> Tensor:
    part = memory[: block.numel()]
    part.copy_(block, non_blocking=True)
    return part


def _num_bytes(shape: StaticShape) -> int:
    return blank(shape).block.numel()


def blank(shape: StaticShape, device: torch.device | None = None) -> UnpaddedBatch:
    """A batch of a shape, in one block of memory that is not filled in; None: on the host."""
    slots = shape.sequences + shape.dummies
    return empty_batch(
        (shape.tokens, *(0,) * (slots - 1)),
        (shape.masked, *(0,) * (slots - 1)),
        num_pairs=shape.sequences,
        device=device,
    ).padded_to(shape)
