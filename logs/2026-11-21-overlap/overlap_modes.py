"""The modes that are timed, and what is noted of each step: when what was ready, sent and done.

Part of measure_overlap.py. Times are `time.perf_counter` seconds, one clock for all
processes of the machine. A mode is a line of MODES: a function from what all have in common and a
process group to one step, itself a function without arguments. The group is that of both ranks
or, to compute all and send nothing, that of this rank alone.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config.sections import (
    ClipPolicy,
    ClipSection,
    ModelSection,
    OptimSection,
)
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.distributed.bucket_plan import plan_in_reverse, plan_layout
from mlperf_bert.distributed.clipping import ClipOutcome, Clipping, make_clipping, plain_wire
from mlperf_bert.distributed.flat_reducer import FlatBuffers, FlatReducer, ShardGroup, flat_weights
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.flat_optimizer import FlatOptimizer, LossScale
from mlperf_bert.optim.optimizers import make_optimizer, make_optimizer_alone
from mlperf_bert.step.eager import EagerStep

BUCKET_CAP_MB = 2.5  # MiB
OPTIM = OptimSection(name="adamw", learning_rate=1e-4)
# Of torch.distributed: asynchronous, `group` by keyword.
COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")
CPU = torch.device("cpu")


@dataclass(slots=True)
class Record:
    """When things happened in one step of one mode, on this rank.

    `ready`, `sent` and `done` have an entry for each bucket in the order in which they happened;
    they are empty where DistributedDataParallel's own all-reduce cannot be seen, `sent` and
    `done` also where nothing is sent.
    """

    start: float = 0.0
    forward_end: float = 0.0
    ready: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    backward_end: float = 0.0
    optimizer_start: float = 0.0
    end: float = 0.0

    @property
    def backward_s(self) -> float:
        """Until the last gradient was ready."""
        return self.ready[-1] - self.forward_end


class Watch:
    """Fills the record of the step under way."""

    def __init__(self) -> None:
        self.record = Record()
        known = [name for name in COLLECTIVES if hasattr(dist, name)]
        self._real = {name: getattr(dist, name) for name in known}
        self._waiting: list[Thread] = []

    def settle(self) -> None:
        """Return when the end of every collective is noted that is waited for in a thread."""
        for thread in self._waiting:
            thread.join()
        self._waiting.clear()

    def mark(self, what: str) -> None:
        """Note the time as the record's field `what`."""
        setattr(self.record, what, time.perf_counter())

    @contextmanager
    def on_collectives(self) -> Iterator[None]:
        """Note when the asynchronous collectives of every hook are sent and done.

        Whoever calls `torch.distributed.all_reduce` gets ours instead.
        """
        try:
            for name, real in self._real.items():
                setattr(dist, name, self._noted(real))
            yield
        finally:
            for name, real in self._real.items():
                setattr(dist, name, real)

    def _noted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, group: dist.ProcessGroup | None = None, **kwargs: Any) -> Any:
            if dist.get_world_size(group) == 1:
                return real(*args, group=group, **kwargs)
            record, number = self.record, len(self.record.sent)
            record.sent.append(time.perf_counter())
            record.done.append(0.0)
            work = real(*args, group=group, **kwargs)

            def note_done(_: object = None) -> None:
                record.done[number] = time.perf_counter()

            if real is self._real["all_reduce"]:
                work.get_future().add_done_callback(note_done)
            else:  # gloo's reduce-scatter has no future
                self._waiting.append(Thread(target=lambda: note_done(work.wait())))
                self._waiting[-1].start()
            return work

        return noted


class WatchedDdp(DistributedDataParallel):
    """Notes when each bucket is ready, which is when its hook is called."""

    def __init__(self, model: BertForPretraining, group: dist.ProcessGroup, watch: Watch) -> None:
        super().__init__(
            model,
            process_group=group,
            bucket_cap_mb=BUCKET_CAP_MB,
            gradient_as_bucket_view=True,
        )
        self._watch = watch
        self.has_hook = False

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register `hook`, with the time noted before."""
        watch = self._watch

        def noted(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            watch.record.ready.append(time.perf_counter())
            future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
            return future

        super().register_comm_hook(state, noted)
        self.has_hook = True


class WatchedClipping:
    """A clipping that notes when the backward, or the wait in it, has ended."""

    def __init__(self, clipping: Clipping, watch: Watch) -> None:
        self._clipping = clipping
        self._watch = watch

    @contextmanager
    def forward(self, *, is_last: bool) -> Iterator[None]:
        """As the clipping has it."""
        with self._clipping.forward(is_last=is_last):
            yield
        self._watch.mark("backward_end")

    def finish(self) -> ClipOutcome:
        """As the clipping has it; what follows is the update."""
        outcome = self._clipping.finish()
        self._watch.mark("optimizer_start")
        return outcome


class WatchedShards(ShardGroup):
    """Notes when each bucket is ready, which is when the reducer sends it, and all are done."""

    def __init__(self, group: dist.ProcessGroup, shards: int, watch: Watch) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        info = RankInfo(
            rank=rank,
            world_size=size,
            local_rank=0,
            local_world_size=1,
            node_rank=rank,
            launcher="torchrun",
        )
        super().__init__(info, shards, CPU)
        self._watch = watch

    def reduce(self, whole: torch.Tensor, piece: torch.Tensor) -> None:
        """As the group has it, with the time noted before."""
        self._watch.record.ready.append(time.perf_counter())
        super().reduce(whole, piece)

    def wait_for_reduced(self) -> None:
        """As the group has it, with the time noted after."""
        super().wait_for_reduced()
        self._watch.settle()
        self._watch.mark("backward_end")


@dataclass(frozen=True, slots=True)
class Setting:
    """What all modes of a case have in common."""

    model: ModelSection
    batch: UnpaddedBatch
    watch: Watch


Step = Callable[[], object]
Mode = Callable[[Setting, dist.ProcessGroup], Step]


def ddp_mode(policy: ClipPolicy, *, hook_if_none: bool = True) -> Mode:
    """DistributedDataParallel with a clip policy.

    A policy without a hook gets torch's own, which does what happens without and can be watched.
    """

    def build(setting: Setting, group: dist.ProcessGroup) -> Step:
        watch = setting.watch
        model = BertForPretraining(setting.model, CPU)
        optimizer = make_optimizer_alone(OPTIM, model)
        ddp = WatchedDdp(model, group, watch)
        clipping = make_clipping(ClipSection(policy=policy), ddp, plain_wire(CPU))
        if hook_if_none and not ddp.has_hook:
            ddp.register_comm_hook(group, allreduce_hook)
        return _step(setting, ddp, optimizer, clipping)

    return build


def reducer_mode(policy: ClipPolicy, *, sharded: bool) -> Mode:
    """Our own reducer: all-reduce in place, or each rank's shard of gradients and state alone."""

    def build(setting: Setting, group: dist.ProcessGroup) -> Step:
        model = BertForPretraining(setting.model, CPU)
        size = dist.get_world_size(group)
        shards = WatchedShards(group, size if sharded else 1, setting.watch)
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        numels = {name: math.prod(shape) for name, shape in shapes.items()}
        planned = plan_in_reverse(numels, 4, BUCKET_CAP_MB)
        layout = plan_layout(shapes, planned, shards.count)
        weights = flat_weights(model, layout)
        buffers = FlatBuffers(model, layout, weights)
        clip = ClipSection(policy=policy)
        reducer = FlatReducer(model, buffers, clip, shards, plain_wire(CPU), size, forwards=1)
        optimizer = make_optimizer(
            OPTIM, buffers, weights, reducer.shard_gradients, shards, LossScale(CPU)
        )
        return _step(setting, model, optimizer, reducer)

    return build


def _step(
    setting: Setting, model: torch.nn.Module, optimizer: FlatOptimizer, clipping: Clipping
) -> Step:
    watch = setting.watch
    model.register_forward_hook(lambda *_: watch.mark("forward_end"))
    step = EagerStep(
        model,
        optimizer,
        torch.tensor([0.0, OPTIM.learning_rate], dtype=torch.float64),
        WatchedClipping(clipping, watch),
        torch.zeros(1, dtype=torch.int64),
        setting.model.precision,
    )
    return lambda: step(1, (setting.batch,))


# To add a mode: one line here. So that it can be drawn (overlap_timeline.PANELS), its step calls
# `setting.watch.mark` for the fields of Record and appends to `record.ready`; what it sends is
# noted where COLLECTIVES names the function.
MODES: dict[str, Mode] = {
    "none, no hook": ddp_mode("none", hook_if_none=False),
    "none": ddp_mode("none"),
    "bucket_before_allreduce": ddp_mode("bucket_before_allreduce"),
    "whole_before_allreduce": ddp_mode("whole_before_allreduce"),
    "after_allreduce": ddp_mode("after_allreduce"),
    "our reducer, bucket": reducer_mode("bucket_before_allreduce", sharded=False),
    "sharded, bucket": reducer_mode("bucket_before_allreduce", sharded=True),
}
