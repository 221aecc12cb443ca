"""Step plans to batches on the device, prepared by a thread ahead of the training loop.

Batches travel on a stream of their own, ahead of the step. On a CPU the calls are the same, but
nothing is copied and nothing waits. For a captured step, batches are padded to a capacity first.

`data.loader = "dali"` sends the same batches there by nvidia-dali's external source.
Nothing is read before the first batch is requested, so building a loader in the untimed init phase
touches no sample.
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


PREFETCHED_STEPS = 2
_DALI_INPUT = "block"


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One rank's work in one step: `micro_batches` holds one batch per micro-batch."""

    plan: StepPlan
    micro_batches: tuple[UnpaddedBatch, ...]
    data_wait_ms: float  # time that the loop waited for it
    planning_ms: float  # time of its plan, in the loader's thread
    received_bytes: int  # received from other processes for this rank's batches


class BatchSource:
    """Source of a rank's batches, called by the loader's thread step after step."""

    received_bytes = 0  # sent by other processes for the batches so far

    def __init__(self, rank: int, set_dir: Path, masks: DynamicMasks | None = None) -> None:
        """Get the batches of `rank` from the set in `set_dir`.

        Without `masks` they keep their stored masks.
        """
        self._rank = rank
        self._set_dir = set_dir
        self._masks = masks

    def micro_batches(self, plan: StepPlan) -> tuple[UnpaddedBatch, ...]:
        """This rank's batches of a step, one per micro-batch, on the host.

        Raises DataError if they cannot be read, or if a sample has another size than in the plan:
        then loss, balance and capacities would be wrong, and ids could belong to other samples.
        """
        batches = tuple(self._stored(plan))
        for forward, batch in enumerate(batches):
            if (batch.lengths, batch.masked_counts) != plan.sizes_of(self._rank, forward):
                raise size_error(self._set_dir)
        if self._masks is None:
            return batches
        return tuple(self._masks.of(batch, plan.step) for batch in batches)

    def close(self) -> None:
        """Free its resources; called once, after the last batch."""

    def _stored(self, plan: StepPlan) -> Iterable[UnpaddedBatch]:
        """The batches with their stored masks."""
        raise NotImplementedError


class DirectSource(BatchSource):
    """A source that reads the samples that the plan gives to this rank."""

    def __init__(self, reader: SampleReader, rank: int, masks: DynamicMasks | None = None) -> None:
        super().__init__(rank, reader.set_dir, masks)
        self._reader = reader

    def _stored(self, plan: StepPlan) -> Iterator[UnpaddedBatch]:
        for ids, denominators in plan.micro_batches_of(self._rank):
            yield make_batch(self._reader.read(ids), ids, **denominators)


class DaliCopy:
    """A copier of memory blocks to a device through nvidia-dali, for `Staging`.

    The pipeline holds one block and runs when called: the loader's thread makes batches ahead of
    the loop. On a GPU (not run) DALI copies from its own page-locked memory to its own device
    memory, for which the loader's thread waits, and from there on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        """Build the pipeline; read nothing. Raises ConfigError if nvidia-dali is missing."""
        try:
            dali: Any = importlib.import_module("nvidia.dali")
            plugin: Any = importlib.import_module("nvidia.dali.plugin.pytorch")
        except ImportError as error:
            problem = f"'dali' needs nvidia-dali ({error})"
            remedy = "run in the checkout: tools/venv.sh dali, or use 'thread'"
            raise ConfigError("data.loader", problem, remedy) from None
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
        """Copy uint8 [bytes] on the host into `memory`, as many bytes on the device."""
        self._pipeline.feed_input(_DALI_INPUT, [block.numpy()])
        (outputs,) = self._pipeline.run()
        self._feed(outputs[0], memory)  # given no stream, it waits: the next block overwrites this


class Loader:
    """An endless iterator over the steps of one rank, from `first_step` on."""

    def __init__(
        self,
        planner: StepPlanner,
        source: BatchSource,
        device: torch.device,
        *,
        first_step: int = 1,
        staging: Staging | None = None,
    ) -> None:
        """Load onto `device`.

        `staging` brings the batches there; None means one that leaves them unpadded.
        """
        self._planner = planner
        self._source = source
        self._staging = staging or Staging(device)
        self._next_step = first_step
        self._queue: queue.Queue[_Made | BaseException] = queue.Queue(PREFETCHED_STEPS)
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
        """Stop the thread; batches made ahead are dropped.

        After an error nothing is waited for: the thread may wait for other ranks, which wait for
        this one. They learn of it when this process ends.
        """
        self._stop.set()
        if error is not None:
            return
        if self._thread.is_alive():
            self._thread.join()
        self._source.close()

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield step batches on the device; an error of the thread is raised here."""
        self._thread.start()
        while True:
            asked = time.perf_counter()
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            data_wait_ms = 1e3 * (time.perf_counter() - asked)
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
        except BaseException as error:  # handed to the loop, which raises it
            self._put(error)

    def _make_steps(self) -> None:
        while not self._stop.is_set():
            started = time.perf_counter()
            plan = self._planner.plan(self._next_step)
            self._next_step += 1
            planning_ms = 1e3 * (time.perf_counter() - started)
            before = self._source.received_bytes
            staged = self._staging.send(self._source.micro_batches(plan), plan)
            self._put(_Made(plan, planning_ms, staged, self._source.received_bytes - before))

    def _put(self, item: "_Made | BaseException") -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue


@dataclass(frozen=True, slots=True)
class _Made:
    """A step as the loader's thread passes it on."""

    plan: StepPlan
    planning_ms: float
    staged: StagedBatches
    received_bytes: int
