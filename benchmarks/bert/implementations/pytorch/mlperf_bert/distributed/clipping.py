"""A config's clip policy around the forwards of an update, on one rank or many."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config import ClipSection
from mlperf_bert.distributed.bucket_plan import DEFAULT_CAP_MB, ReadyGradient, plan_buckets
from mlperf_bert.distributed.clip_hook import Bucket, ClipOutcome, ClipState, clip_hook
from mlperf_bert.distributed.clip_policies import clip_together, gradient_norm


class Clipping(Protocol):
    """Has an update's forwards and backwards run in its contexts, and clips their gradients."""

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """The context of one forward and its backward."""

    def finish(self) -> ClipOutcome:
        """Called after the last: the gradients are now those to update with."""


def make_clipping(
    clip: ClipSection,
    model: nn.Module,
    *,
    forwards: int = 1,
    bucket_cap_mb: float = DEFAULT_CAP_MB,
) -> Clipping:
    """The policy of a config for `model`, bare or wrapped in DistributedDataParallel.

    A wrapped model gets the hook of a policy that clips before the all-reduce, once for all; its
    buckets are those it has. `bucket_cap_mb` (MiB) cuts those of a bare one.
    """
    if clip.policy in ("none", "after_allreduce"):
        return ClipAfter(clip, model)
    if isinstance(model, DistributedDataParallel):
        return ClipBefore(clip, model, forwards)
    return ClipOnOneRank(clip, model, forwards, bucket_cap_mb)


class ClipAfter:
    """`after_allreduce` and `none`: equal on all ranks, as is the norm they go by."""

    def __init__(self, clip: ClipSection, model: nn.Module) -> None:
        self._clip = clip
        self._model = model

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients add up; the last backward averages them over the ranks."""
        return _local_but_for_the_last(self._model, is_last)

    def finish(self) -> ClipOutcome:
        """Limit the norm of the averaged gradient, or measure it alone."""
        gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
        if self._clip.policy == "none":
            norm = gradient_norm(gradients)
            clipped = torch.zeros_like(norm)
        else:
            norm = clip_together(gradients, self._clip.max_norm, world_size=1)
            clipped = norm > self._clip.max_norm
        return ClipOutcome(norm, clipped.float(), skip=(~torch.isfinite(norm)).float())


class ClipBefore:
    """The policies that act in DistributedDataParallel's hook."""

    def __init__(self, clip: ClipSection, ddp: DistributedDataParallel, forwards: int) -> None:
        group = ddp.process_group
        self._ddp = ddp
        self._each_forward = clip.accumulation == "each_forward"
        self._state = ClipState(
            clip, ddp.parameters(), group.size(), forwards=forwards, group=group
        )
        ddp.register_comm_hook(self._state, clip_hook)

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Under "each_forward" every backward reaches the hook, else the last alone."""
        if not self._each_forward:
            return _local_but_for_the_last(self._ddp, is_last)
        self._state.begin_forward(is_last=is_last)
        return contextlib.nullcontext()

    def finish(self) -> ClipOutcome:
        """What the hook found."""
        return self._state.finish()


class ClipOnOneRank:
    """The same policies without an all-reduce: `whole_before_allreduce` is `after_allreduce` here.

    Buckets are planned as DistributedDataParallel would, taking gradients to become ready in the
    reverse order of the parameters.
    """

    def __init__(
        self, clip: ClipSection, model: nn.Module, forwards: int, bucket_cap_mb: float
    ) -> None:
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        ready = [
            ReadyGradient(name=name, numel=trained[name].numel(), ready_at=1.0)
            for name in reversed(trained)
        ]
        element_bytes = max(each.element_size() for each in trained.values())
        planned = plan_buckets(ready, element_bytes, bucket_cap_mb)
        self._buckets = [[trained[name] for name in bucket.names] for bucket in planned]
        self._each_forward = clip.accumulation == "each_forward"
        self._state = ClipState(clip, trained.values(), 1, forwards=forwards)

    @contextlib.contextmanager
    def forward(self, *, is_last: bool) -> Iterator[None]:
        """Clips when the backward is done, where the hook would."""
        yield
        if is_last or self._each_forward:
            self._state.begin_forward(is_last=is_last)
            self._state.clip(
                [_with_gradients(bucket) for bucket in self._buckets], ends_forward=True
            )

    def finish(self) -> ClipOutcome:
        """What was clipped."""
        return self._state.finish()


def _with_gradients(parameters: Sequence[nn.Parameter]) -> Bucket:
    gradients = [each.grad for each in parameters if each.grad is not None]
    return Bucket(gradients, parameters, gradients)


def _local_but_for_the_last(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    ddp = model if isinstance(model, DistributedDataParallel) else None
    return contextlib.nullcontext() if is_last or ddp is None else ddp.no_sync()
