"""A config's clip policy around the forwards of an update, on one rank or many."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config.sections import ClipSection
from mlperf_bert.distributed.bucket_plan import DEFAULT_CAP_MB, plan_in_reverse
from mlperf_bert.distributed.clip_hook import Bucket, ClipOutcome, ClipState, clip_hook
from mlperf_bert.distributed.clip_policies import clips_before, gradient_norm, limit_factor
from mlperf_bert.distributed.wire import Wire


class Clipping(Protocol):
    """Has an update's forwards and backwards run in its contexts, and clips their gradients."""

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """The context of one forward and its backward."""

    def finish(self) -> ClipOutcome:
        """Called after the last: the gradients are now those to update with, but for a factor."""


def make_clipping(
    clip: ClipSection,
    model: nn.Module,
    wire: Wire,
    *,
    forwards: int = 1,
    bucket_cap_mb: float = DEFAULT_CAP_MB,
) -> Clipping:
    """The policy of a config for `model`, bare or wrapped in DistributedDataParallel.

    A wrapped model gets the hook of a policy that clips before the all-reduce, or of a wire that
    changes the dtype, once for all; its buckets are those it has. `bucket_cap_mb` (MiB) cuts those
    of a bare one.
    """
    ddp = model if isinstance(model, DistributedDataParallel) else None
    if not clips_before(clip):
        if ddp is None or wire.dtype is None:
            return ClipAfter(clip, model, wire.loss_scale)
        _register_hook(ddp, clip, wire, forwards)
        return ClipAfter(clip, model, wire.scale)
    if ddp is None:
        unsent = replace(wire, dtype=None)
        return ClipOnOneRank(clip, model, unsent, forwards, bucket_cap_mb)
    return ClipBefore(clip, ddp, _register_hook(ddp, clip, wire, forwards))


def _register_hook(
    ddp: DistributedDataParallel, clip: ClipSection, wire: Wire, forwards: int
) -> ClipState:
    group = ddp.process_group
    state = ClipState(
        clip, ddp.parameters(), group.size(), forwards=forwards, group=group, wire=wire
    )
    ddp.register_comm_hook(state, clip_hook)
    return state


class ClipAfter:
    """`after_allreduce` and `none`: equal on all ranks, as is the norm they go by.

    `scale` (0-d) is what the averaged gradients are too large by.
    """

    def __init__(self, clip: ClipSection, model: nn.Module, scale: Tensor) -> None:
        self._clip = clip
        self._model = model
        self._scale = scale

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients add up; the last backward averages them over the ranks."""
        return _local_but_for_the_last(self._model, is_last)

    def finish(self) -> ClipOutcome:
        """Limit the norm of the averaged gradient, or measure it alone."""
        gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
        return outcome_after(self._clip, gradient_norm(gradients), self._scale)


def outcome_after(clip: ClipSection, norm: Tensor, scale: Tensor) -> ClipOutcome:
    """What `after_allreduce` or `none` makes of the averaged gradient's norm.

    Args:
        norm: 0-d, of gradients that are `scale` (0-d) times too large.
    """
    norm = norm / scale
    limited = clip.policy == "after_allreduce"
    clipped = norm > clip.max_norm if limited else torch.zeros_like(norm)
    factor = limit_factor(norm, clip.max_norm) if limited else torch.ones_like(norm)
    return ClipOutcome(
        grad_norm=norm,
        clipped_fraction=clipped.float(),
        skip=(~torch.isfinite(norm)).float(),
        gradient_factor=(factor / scale).float(),
    )


class ClipBefore:
    """The policies that act in DistributedDataParallel's hook."""

    def __init__(self, clip: ClipSection, ddp: DistributedDataParallel, state: ClipState) -> None:
        self._ddp = ddp
        self._each_forward = clip.accumulation == "each_forward"
        self._state = state

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
        self,
        clip: ClipSection,
        model: nn.Module,
        wire: Wire,
        forwards: int,
        bucket_cap_mb: float,
    ) -> None:
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        element_bytes = max(each.element_size() for each in trained.values())
        numel_by_name = {name: each.numel() for name, each in trained.items()}
        planned = plan_in_reverse(numel_by_name, element_bytes, bucket_cap_mb)
        self._buckets = [[trained[name] for name in bucket.names] for bucket in planned]
        self._each_forward = clip.accumulation == "each_forward"
        self._state = ClipState(clip, trained.values(), 1, forwards=forwards, wire=wire)

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
    return Bucket(gradients, parameters, gradients, gradients[0])


def _local_but_for_the_last(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    ddp = model if isinstance(model, DistributedDataParallel) else None
    return contextlib.nullcontext() if is_last or ddp is None else ddp.no_sync()
