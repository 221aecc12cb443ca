"""Turn step plans into batches on the device, in a thread that runs ahead of the training loop.

Batches are copied to the device on a separate stream, ahead of their step. On a CPU the calls are
the same, but nothing is copied and nothing waits. For a captured step, batches are first padded to
a capacity. `data.loader = "dali"` sends the same batches through nvidia-dali's external source.

Nothing is read before the first batch is requested, so that the untimed init phase can build a
loader without touching a sample.
"""

import importlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from mlperf_bert.data.balance import StepPlan, StepPlanner
from mlperf_bert.data.batch import UnpaddedBatch, make_batch, pad
from mlperf_bert.data.capacity import StaticShape, shape_of
from mlperf_bert.data.masking import DynamicMasks
from mlperf_bert.data.shards import SampleReader, size_error
from mlperf_bert.errors import ConfigError
from mlperf_bert.extras import require_packages

# Copies a host block, uint8 [bytes], into device memory of the same size. Work that is queued later
# on the current stream sees the copy.
Copy = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class StagedBatches:
    """Batches that are on the device or being copied to it."""

    batches: tuple[UnpaddedBatch, ...]
    copied: torch.cuda.Event | None  # None if there is nothing to wait for


class Staging:
    """Sends batches to a device from the loader's thread, and receives them in the loop's thread.

    Batches of a step that fits into no capacity stay unpadded.

    Args:
        device: the device to send batches to.
        copy: copies a memory block, also on a CPU. None means an asynchronous copy from page-locked
            memory.
        shapes: shapes of the capacities, smallest first. Empty if no step is captured.
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
        """Return a context in which the thread's CUDA calls use this device and the side stream.

        The loader's thread needs it because a new thread always starts on GPU 0.
        """
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def send(self, batches: tuple[UnpaddedBatch, ...], plan: StepPlan) -> StagedBatches:
        """Queue the copies without waiting for them. Call it within `thread_context`."""
        shape = shape_of(plan, self._shapes)
        if shape is not None:
            batches = tuple(pad(batch, shape) for batch in batches)
        on_device = tuple(map(self._on_device, batches))
        copied = None if self._stream is None else self._stream.record_event()
        return StagedBatches(on_device, copied)

    def _on_device(self, batch: UnpaddedBatch) -> UnpaddedBatch:
        """Copy the batch into its own device memory."""
        if self._copy is not None:
            return batch.map_blocks(self._copied)
        if self._stream is None:
            return batch
        return batch.pin_memory().to(self._device)  # copies of pageable memory block the host

    def _copied(self, block: Tensor) -> Tensor:
        """Copy the block into new device memory with `copy`."""
        assert self._copy is not None
        memory = torch.empty_like(block, device=self._device)
        self._copy(block, memory)
        return memory

    def receive(self, staged: StagedBatches) -> tuple[UnpaddedBatch, ...]:
        """Make the batches usable by work queued later on the current stream, and return them.

        The loop's thread calls this. The host does not wait for the copies.
        """
        if staged.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(staged.copied)

            def used_on_stream(block: Tensor) -> Tensor:
                # The memory was allocated on the side stream. The stream's next copy must not
                # reuse it while a kernel queued here may still read it.
                block.record_stream(stream)
                return block

            for batch in staged.batches:
                batch.map_blocks(used_on_stream)
        return staged.batches


PREFETCHED_STEPS = 2
_DALI_INPUT = "block"
_THREAD = "use loader 'thread'"


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One rank's work in one step."""

    plan: StepPlan
    micro_batches: tuple[UnpaddedBatch, ...]
    data_wait_ms: float  # time that the loop waited for the batches
    planning_ms: float  # time that the loader's thread needed for the plan
    received_bytes: int  # bytes received from other processes for these batches


class BatchSource:
    """Provides a rank's batches. The loader's thread calls it once per step."""

    received_bytes = 0  # bytes received from other processes so far

    def __init__(self, rank: int, set_dir: Path, masks: DynamicMasks | None = None) -> None:
        """Provide the batches of `rank` from the set in `set_dir`.

        If `masks` is None, batches keep their stored masks.
        """
        self._rank = rank
        self._set_dir = set_dir
        self._masks = masks

    def micro_batches(self, plan: StepPlan) -> tuple[UnpaddedBatch, ...]:
        """Return this rank's batches of a step on the host, one per micro-batch.

        Raises DataError if they cannot be read, or if the size of a sample differs from the plan.
        In that case loss, balance and capacities would be wrong, and ids could belong to other
        samples.
        """
        batches = tuple(self._stored(plan))
        for number, batch in enumerate(batches):
            if (batch.lengths, batch.masked_counts) != plan.sizes_of(self._rank, number):
                raise size_error(self._set_dir)
        if self._masks is None:
            return batches
        return tuple(self._masks.of(batch, plan.step) for batch in batches)

    def close(self) -> None:
        """Free all resources. Called once, after the last batch."""

    def _stored(self, plan: StepPlan) -> Iterable[UnpaddedBatch]:
        """Return the micro-batches of a step with their stored masks."""
        raise NotImplementedError


class DirectSource(BatchSource):
    """Reads the samples that the plan assigns to this rank."""

    def __init__(self, reader: SampleReader, rank: int, masks: DynamicMasks | None = None) -> None:
        super().__init__(rank, reader.set_dir, masks)
        self._reader = reader

    def _stored(self, plan: StepPlan) -> Iterator[UnpaddedBatch]:
        for ids, denominators in plan.micro_batches_of(self._rank):
            yield make_batch(self._reader.read(ids), ids, **denominators)


class DaliCopy:
    """Copies memory blocks to a device through nvidia-dali, for `Staging`.

    The pipeline contains one block and runs only when called, because the loader's thread already
    makes batches ahead of the loop. On a GPU, where this has never been run, DALI copies from its
    own page-locked memory to its own device memory, and the loader's thread waits for this copy.
    From there the block is copied on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        """Build the pipeline without reading data. Raises ConfigError if nvidia-dali is missing."""
        require_packages("data.loader", "dali", "nvidia.dali", otherwise=_THREAD, may_ask=False)
        try:
            dali: Any = importlib.import_module("nvidia.dali")
            plugin: Any = importlib.import_module("nvidia.dali.plugin.pytorch")
        except ImportError as error:
            problem = f"nvidia-dali cannot be imported ({error})"
            raise ConfigError("data.loader", problem, _THREAD) from None
        self._feed = plugin.feed_ndarray
        self._pipeline = dali.Pipeline(
            batch_size=1,
            num_threads=1,
            device_id=device.index if device.type == "cuda" else None,
            exec_pipelined=False,
            exec_async=False,
            prefetch_queue_depth=1,
        )
        with self._pipeline:
            block = dali.fn.external_source(name=_DALI_INPUT, ndim=1)
            self._pipeline.set_outputs(block.gpu() if device.type == "cuda" else block)
        self._pipeline.build()

    def __call__(self, block: Tensor, memory: Tensor) -> None:
        """Copy a host block, uint8 [bytes], into device memory of the same size."""
        self._pipeline.feed_input(_DALI_INPUT, [block.numpy()])
        (outputs,) = self._pipeline.run()
        # Without a stream argument this call waits for the copy. That is needed, because the next
        # block overwrites the output.
        self._feed(outputs[0], memory)


class Loader:
    """Iterates endlessly over the steps of one rank, starting with `first_step`."""

    def __init__(
        self,
        planner: StepPlanner,
        source: BatchSource,
        device: torch.device,
        *,
        first_step: int = 1,
        staging: Staging | None = None,
    ) -> None:
        """Load batches onto `device`.

        `staging` sends the batches there. If it is None, they stay unpadded.
        """
        self._planner = planner
        self._source = source
        self._staging = staging or Staging(device)
        self._next_step = first_step
        self._queue: queue.Queue[_StagedStep | BaseException] = queue.Queue(PREFETCHED_STEPS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="loader", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the thread, and drop batches that were made ahead.

        After an error this does not wait for the thread, because the thread may be waiting for
        other ranks, which wait for this one. They notice when this process exits.
        """
        self._stop.set()
        if error is not None:
            return
        if self._thread.is_alive():
            self._thread.join()
        self._source.close()

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield step batches on the device. Raises any error of the loader's thread."""
        self._thread.start()
        while True:
            requested = time.perf_counter()
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            data_wait_ms = 1e3 * (time.perf_counter() - requested)
            yield StepBatch(
                item.plan,
                self._staging.receive(item.staged),
                data_wait_ms,
                item.planning_ms,
                item.received_bytes,
            )

    def _produce(self) -> None:
        try:
            with self._staging.thread_context():
                self._make_steps()
        except BaseException as error:  # passed to the loop, which raises it
            self._put(error)

    def _make_steps(self) -> None:
        while not self._stop.is_set():
            started = time.perf_counter()
            plan = self._planner.plan(self._next_step)
            self._next_step += 1
            planning_ms = 1e3 * (time.perf_counter() - started)
            before = self._source.received_bytes
            staged = self._staging.send(self._source.micro_batches(plan), plan)
            received_bytes = self._source.received_bytes - before
            self._put(_StagedStep(plan, planning_ms, staged, received_bytes))

    def _put(self, item: "_StagedStep | BaseException") -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue


@dataclass(frozen=True, slots=True)
class _StagedStep:
    """A step as the loader's thread passes it to the loop."""

    plan: StepPlan
    planning_ms: float
    staged: StagedBatches
    received_bytes: int
