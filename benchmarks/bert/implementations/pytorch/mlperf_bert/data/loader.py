"""Step plans to batches on the device, prepared by a thread ahead of the training loop.

Nothing is read before the first batch is asked for, so building a loader in the untimed init phase
touches no sample.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import torch

from mlperf_bert.data.balance import StepPlan, StepPlanner
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.gather import ADVISED_STEPS, Gatherer, ReadAhead
from mlperf_bert.data.masking import DynamicMasks
from mlperf_bert.data.shards import size_error
from mlperf_bert.data.staging import CapacityStaging, StagedBatches, Staging

WAITS_FOR = "loader"  # for distributed/failures.py
PREFETCHED_STEPS = 2
PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one rank computes in one step: `micro_batches` holds one batch per forward."""

    plan: StepPlan
    micro_batches: tuple[UnpaddedBatch, ...]
    wait_ms: float  # how long the loop waited for it
    planning_ms: float  # how long its plan took, in the loader's thread
    received_bytes: int  # from other processes, for this rank's batches


class BatchSource(Protocol):
    """Where a rank's batches come from; called by the loader's thread, step after step."""

    @property
    def received_bytes(self) -> int:
        """What other processes have sent for the batches so far."""

    def micro_batches(self, plan: StepPlan) -> tuple[UnpaddedBatch, ...]:
        """This rank's batches of a step, one per forward, on the host or the loader's device."""

    def close(self) -> None:
        """Let go of what it holds; called once, after the last batch."""


class DirectSource:
    """Reads the samples that the plan gives to this rank; without `masks` as they are stored."""

    def __init__(self, gatherer: Gatherer, rank: int, masks: DynamicMasks | None = None) -> None:
        self._gatherer = gatherer
        self._rank = rank
        self._masks = masks

    @property
    def received_bytes(self) -> int:
        """Nothing: this rank reads by itself."""
        return 0

    def micro_batches(self, plan: StepPlan) -> tuple[UnpaddedBatch, ...]:
        """This rank's batches of a step on the host, one per forward.

        Raises DataError as `SampleReader.read`, and where their sizes are not those planned: loss,
        balance and capacities would be wrong.
        """
        batches = tuple(
            self._gatherer.batch(
                plan.ids_of(self._rank, forward),
                mlm_denominator=float(plan.mlm_denominators[self._rank, forward]),
                nsp_denominator=float(plan.nsp_denominators[self._rank, forward]),
            )
            for forward in range(plan.counts.shape[1])
        )
        if self._masks is not None:
            batches = tuple(self._masks.of(batch, plan.step) for batch in batches)
        planned = zip(plan.num_tokens[self._rank], plan.num_masked[self._rank], strict=True)
        for batch, sizes in zip(batches, planned, strict=True):
            if (sum(batch.lengths), sum(batch.masked_counts)) != sizes:
                raise size_error(self._gatherer.reader.set_dir)
        return batches

    def close(self) -> None:
        """Nothing to let go of."""


class Loader:
    """Iterates over the steps of one rank, from `first_step` on, without end."""

    def __init__(
        self,
        planner: StepPlanner,
        source: BatchSource,
        device: torch.device,
        *,
        first_step: int = 1,
        read_ahead: ReadAhead | None = None,
        staging: Staging | CapacityStaging | None = None,
    ) -> None:
        """Load onto `device`; `read_ahead` is told of the steps that come next.

        `staging` brings the batches there; None: one that leaves them unpadded.
        """
        self._planner = planner
        self._source = source
        self._staging = staging or Staging(device)
        self._next_step = first_step
        self._read_ahead = read_ahead
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
        """Stop the thread; batches made ahead are dropped."""
        self._stop.set()
        self._staging.close()
        if self._thread.is_alive():
            # After an error it may wait for other ranks, which wait for this one.
            self._thread.join(None if error is None else PATIENCE_S)
        if not self._thread.is_alive():
            self._source.close()

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield step batches on the device; an error of the thread is raised here."""
        self._thread.start()
        while True:
            asked = time.perf_counter()
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            wait_ms = 1e3 * (time.perf_counter() - asked)
            yield StepBatch(
                item.planned.plan,
                self._staging.receive(item.staged),
                wait_ms,
                item.planned.planning_ms,
                item.received_bytes,
            )

    def _produce(self) -> None:
        try:
            with self._staging.thread_context():
                self._make_steps()
        except BaseException as error:  # handed to the loop, which raises it
            self._put(error)

    def _make_steps(self) -> None:
        coming = deque([self._plan()])
        self._advise(coming)
        while not self._stop.is_set():
            planned = coming.popleft()
            before = self._source.received_bytes
            batches = self._source.micro_batches(planned.plan)
            staged = self._staging.send(batches, planned.plan)
            self._put(_Made(planned, staged, self._source.received_bytes - before))
            # After the first batch: the loop waits for that one with the clock running.
            while len(coming) < ADVISED_STEPS:
                coming.append(self._plan())
            self._advise(coming)

    def _plan(self) -> "_Planned":
        started = time.perf_counter()
        plan = self._planner.plan(self._next_step)
        self._next_step += 1
        return _Planned(plan, 1e3 * (time.perf_counter() - started))

    def _advise(self, coming: "deque[_Planned]") -> None:
        if self._read_ahead is not None:
            self._read_ahead.advise([planned.plan for planned in coming])

    def _put(self, item: "_Made | BaseException") -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return
            except queue.Full:
                continue


@dataclass(frozen=True, slots=True)
class _Planned:
    plan: StepPlan
    planning_ms: float


@dataclass(frozen=True, slots=True)
class _Made:
    """A step as the loader's thread hands it over."""

    planned: _Planned
    staged: StagedBatches
    received_bytes: int
