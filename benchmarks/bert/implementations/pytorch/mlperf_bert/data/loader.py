"""Turn step plans into batches on the device, in a thread that runs ahead of the training loop.

Batches are copied to the device on a separate stream, ahead of their step. On a CPU, the same calls
neither copy nor wait. For a captured step, the loader first pads the batches to a capacity.
`data.loader = "dali"` copies the same batches to the device through the external source of
nvidia-dali.

The loader reads no samples before the first batch is requested. It can therefore be built in the
untimed init phase, in which MLPerf forbids reading samples.
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
    """Batches that have been copied to the device, or whose copies are still in progress."""

    batches: tuple[UnpaddedBatch, ...]
    copied: torch.cuda.Event | None  # None if there is nothing to wait for


class Staging:
    """The transfer of batches from the loader's thread to a device and to the loop's thread.

    The batches of a step that fits into none of the shapes stay unpadded.

    Args:
        device: the device to send batches to.
        copy: copies a memory block to the device, which may be the CPU. None means an asynchronous
            copy from page-locked memory to a GPU.
        shapes: shapes of the capacities, smallest first, or empty if no step is captured.
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
        """Return a context manager that selects this device and the side stream for CUDA calls.

        The loader's thread must use this context, because a new thread always starts with GPU 0.
        """
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def send(self, batches: tuple[UnpaddedBatch, ...], plan: StepPlan) -> StagedBatches:
        """Queue the copies of a step's batches to the device, without waiting for them.

        Call this method within `thread_context`.
        """
        shape = shape_of(plan, self._shapes)
        if shape is not None:
            batches = tuple(pad(batch, shape) for batch in batches)
        on_device = tuple(map(self._on_device, batches))
        copied = None if self._stream is None else self._stream.record_event()
        return StagedBatches(on_device, copied)

    def _on_device(self, batch: UnpaddedBatch) -> UnpaddedBatch:
        """Copy the batch into newly allocated memory of the device.

        On a CPU without `copy`, the batch itself is returned.
        """
        if self._copy is not None:
            return batch.map_blocks(self._copied)
        if self._stream is None:
            return batch
        return batch.pin_memory().to(self._device)  # copies of pageable memory block the host

    def _copied(self, block: Tensor) -> Tensor:
        """Allocate device memory, and use `copy` to copy the memory block into it."""
        assert self._copy is not None
        memory = torch.empty_like(block, device=self._device)
        self._copy(block, memory)
        return memory

    def receive(self, staged: StagedBatches) -> tuple[UnpaddedBatch, ...]:
        """Return the batches, ready for work that is queued later on the current stream.

        The loop's thread calls this method. The device waits for the copies, but the host does not.
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
    """The batches of one rank for one step, with the plan and the timings of the step."""

    plan: StepPlan
    micro_batches: tuple[UnpaddedBatch, ...]
    data_wait_ms: float  # time that the loop waited for the batches


class BatchSource:
    """Base class of sources of one rank's batches, called by the loader's thread once per step."""

    def __init__(self, rank: int, set_dir: Path, masks: DynamicMasks | None = None) -> None:
        """Prepare to provide the batches of `rank` from the set in `set_dir`.

        If `masks` is None, batches keep their stored masks.
        """
        self._rank = rank
        self._set_dir = set_dir
        self._masks = masks

    def micro_batches(self, plan: StepPlan) -> tuple[UnpaddedBatch, ...]:
        """Return this rank's batches of a step in host memory, one per micro-batch.

        Raises DataError if the samples cannot be read, or if the size of a sample differs from the
        plan. With a wrong size, the loss, the balance and the capacities would be wrong, and the
        ids could belong to other samples.
        """
        batches = tuple(self._stored(plan))
        for number, batch in enumerate(batches):
            if (batch.lengths, batch.masked_counts) != plan.sizes_of(self._rank, number):
                raise size_error(self._set_dir)
        if self._masks is None:
            return batches
        return tuple(self._masks.of(batch, plan.step) for batch in batches)

    def close(self) -> None:
        """Free all resources. The loader calls this method once, after the last batch."""

    def _stored(self, plan: StepPlan) -> Iterable[UnpaddedBatch]:
        """Return the micro-batches of a step with their stored masks."""
        raise NotImplementedError


class DirectSource(BatchSource):
    """A source of batches that reads the samples assigned to this rank by the plan."""

    def __init__(self, reader: SampleReader, rank: int, masks: DynamicMasks | None = None) -> None:
        super().__init__(rank, reader.set_dir, masks)
        self._reader = reader

    def _stored(self, plan: StepPlan) -> Iterator[UnpaddedBatch]:
        for ids, denominators in plan.micro_batches_of(self._rank):
            yield make_batch(self._reader.read(ids), ids, **denominators)


class DaliCopy:
    """A function object that copies memory blocks to a device through nvidia-dali.

    The pipeline contains one block and prefetches nothing, because the loader's thread already
    prepares batches ahead of the loop. On a GPU, DALI copies the block from its own page-locked
    memory to its own device memory, while the loader's thread waits. The block is then copied to
    its final place on the current stream. This class has never been run on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        """Build the pipeline without reading data.

        Raises ConfigError if nvidia-dali cannot be imported.
        """
        require_packages("data.loader", "dali", "nvidia.dali", otherwise=_THREAD)
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
        """Copy a block of host memory, uint8 [bytes], into device memory of the same size."""
        self._pipeline.feed_input(_DALI_INPUT, [block.numpy()])
        (outputs,) = self._pipeline.run()
        # Without a stream argument this call waits for the copy. That is needed, because the next
        # block overwrites the output.
        self._feed(outputs[0], memory)


class Loader:
    """An endless iterator over the steps of one rank, starting with `first_step`."""

    def __init__(
        self,
        planner: StepPlanner,
        source: BatchSource,
        device: torch.device,
        *,
        first_step: int = 1,
        staging: Staging | None = None,
    ) -> None:
        """Prepare to load batches onto `device`.

        `staging` copies the batches to the device. If `staging` is None, the loader creates a
        default `Staging`, which leaves batches unpadded.
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
        """Stop the loader's thread, and discard the batches that it prepared ahead.

        After an error, this method does not wait for the thread, because the thread may be waiting
        for other ranks, which in turn wait for this rank. The other ranks notice when this process
        exits.
        """
        self._stop.set()
        if error is not None:
            return
        if self._thread.is_alive():
            self._thread.join()
        self._source.close()

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield the batches of each step, on the device.

        Raises any error that occurred in the loader's thread.
        """
        self._thread.start()
        while True:
            requested = time.perf_counter()
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            data_wait_ms = 1e3 * (time.perf_counter() - requested)
            yield StepBatch(item.plan, self._staging.receive(item.staged), data_wait_ms)

    def _produce(self) -> None:
        try:
            with self._staging.thread_context():
                self._make_steps()
        except BaseException as error:  # passed to the loop, which raises it
            self._put(error)

    def _make_steps(self) -> None:
        while not self._stop.is_set():
            plan = self._planner.plan(self._next_step)
            self._next_step += 1
            staged = self._staging.send(self._source.micro_batches(plan), plan)
            self._put(_StagedStep(plan, staged))

    def _put(self, item: "_StagedStep | BaseException") -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue


@dataclass(frozen=True, slots=True)
class _StagedStep:
    """The plan and batches of one step, as the loader's thread passes them to the loop."""

    plan: StepPlan
    staged: StagedBatches
