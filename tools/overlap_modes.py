"""The modes that are timed, and what is noted of each step: when what was ready, sent and done.

Part of tools/measure_overlap.py. Times are `time.perf_counter` seconds, one clock for all
processes of the machine. A mode is a line of MODES: a function from what all have in common and a
process group to one step, itself a function without arguments. The group is that of both ranks
or, to compute all and send nothing, that of this rank alone.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config import ClipPolicy, ClipSection, ModelSection, OptimSection
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.distributed.clip_hook import ClipOutcome
from mlperf_bert.distributed.clipping import Clipping, make_clipping
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.registry import make_optimizer
from mlperf_bert.step import EagerStep

BUCKET_CAP_MB = 2.5  # MiB
OPTIM = OptimSection(name="adamw", learning_rate=1e-4)
COLLECTIVES = ("all_reduce",)  # of torch.distributed: asynchronous, `group` by keyword


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
        self._real = {name: getattr(dist, name) for name in COLLECTIVES}

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

            def note_done(_: torch.futures.Future[Any]) -> None:
                record.done[number] = time.perf_counter()

            work.get_future().add_done_callback(note_done)
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
        """As the clipping has it."""
        return self._clipping.finish()


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
        model = BertForPretraining(setting.model, torch.device("cpu"))
        optimizer = make_optimizer(model, OPTIM)
        ddp = WatchedDdp(model, group, watch)
        clipping = make_clipping(ClipSection(policy=policy), ddp)
        if hook_if_none and not ddp.has_hook:
            ddp.register_comm_hook(group, allreduce_hook)
        ddp.register_forward_hook(lambda *_: watch.mark("forward_end"))
        optimizer.register_step_pre_hook(lambda *_: watch.mark("optimizer_start"))
        step = EagerStep(
            ddp,
            optimizer,
            lambda _: OPTIM.learning_rate,
            WatchedClipping(clipping, watch),
            setting.model.precision,
        )
        return lambda: step(1, (setting.batch,))

    return build


# To add a mode: one line here. So that it can be drawn (overlap_timeline.PANELS), its step calls
# `setting.watch.mark` for the fields of Record and appends to `record.ready`; what it sends is
# noted where COLLECTIVES names the function.
MODES: dict[str, Mode] = {
    "none, no hook": ddp_mode("none", hook_if_none=False),
    "none": ddp_mode("none"),
    "bucket_before_allreduce": ddp_mode("bucket_before_allreduce"),
    "whole_before_allreduce": ddp_mode("whole_before_allreduce"),
    "after_allreduce": ddp_mode("after_allreduce"),
}
