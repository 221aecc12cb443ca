"""Clip policies for gradient buckets, which also work under DistributedDataParallel.

With N ranks, g_i the gradient of rank i, g_ib its part in bucket b, C = max_norm, and
limit(x, c) = x * min(1, c / ||x||) in the L2 norm:

- `none`: mean_i g_i
- `after_allreduce`: limit(mean_i g_i, C)
- `whole_before_allreduce`: mean_i limit(g_i, C)
- `bucket_before_allreduce`: mean_i limit(g_ib, C_b) in each bucket b, where
  `by_size`: C_b = C * sqrt(numel_b / numel_total), so that sum_b C_b^2 = C^2 whatever the plan of
  buckets; `equal_share`: C_b = C / sqrt(bucket_count), as published, with the count pinned because
  DistributedDataParallel starts with one bucket and its later number depends on dtype and layout.

With A forwards an update, g_i is their sum (`accumulated`), or each forward's gradient is limited
to C / A (C_b / A) before it is added (`each_forward`). The loss weighs each forward about 1 / A, so
this is the published mean of forwards limited to C each.

Sources: arXiv 2402.02447 (`bucket_before_allreduce`); MLPerf Training rules, BERT reference
(`after_allreduce`).

Any DistributedDataParallel model can use them through a communication hook (docs/how/clipping.md):

    state = ClipState(ClipSection(policy="bucket_before_allreduce"), model.parameters(), world_size)
    ddp.register_comm_hook(state, clip_hook)

and `state.finish()` after each backward that reduced. The host never waits for the device. A rank
whose gradient norm is not finite sends NaN in place of the bucket; every rank receives the NaN, so
all skip the same step without another collective. A bucket below its limit that travels in its own
dtype is only multiplied by 1 / N, as DistributedDataParallel does by itself: the result is the
same, bit for bit.

fp16 holds 6e-5 to 65,504 at full precision: gradients are scaled into that range before they travel
and back in the optimizer's update. The scale is:

- if a policy clips before the all-reduce, the sum's norm is at most max_norm: the largest power of
  two that keeps it at or below 2^15, so that no element can overflow;
- else the loss scale, or 2^10 if the loss is not scaled. A sum that overflows then shows in the
  norm, and the step is skipped.

The sums over ranks themselves: docs/how/numerics.md, "Summing gradients in 16 bits".
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, Work
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config.sections import CLIPPED_TOGETHER, AllreduceDtype, ClipSection
from mlperf_bert.distributed.bucket_plan import DEFAULT_CAP_MB, plan_in_reverse

UNSCALED_LOSS_EXPONENT = 10
LARGEST_SUM_EXPONENT = 15
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ROW = 1024  # elements of which a CPU takes the norm at a time


def clips_before(clip: ClipSection) -> bool:
    """True if the policy clips what a rank sends, not what it received."""
    return clip.policy not in CLIPPED_TOGETHER


def limit_before_allreduce(clip: ClipSection, numel: int, numel_total: int) -> float:
    """The limit C or C_b of `numel` elements clipped together, of the model's `numel_total`."""
    if clip.policy == "whole_before_allreduce":
        return clip.max_norm
    if clip.bucket_limit == "equal_share":
        return clip.max_norm / math.sqrt(clip.bucket_count)
    return clip.max_norm * math.sqrt(numel / numel_total)


def limit_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / norm), exactly 1 if the norm is within the limit; 0-d like `norm`.

    It is NaN if the norm is not finite, so that the whole bucket becomes NaN: otherwise finite
    elements whose norm overflows would become zeros, unnoticed by the other ranks.
    """
    return torch.where(torch.isfinite(norm), max_norm / norm.clamp(min=max_norm), torch.nan)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm over all tensors together, 0-d, on their device; fp32 for 16-bit gradients."""
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    if gradients[0].device.type == "cpu":
        return combine_norms([_norm_on_cpu(each, dtype) for each in gradients])
    return combine_norms(torch._foreach_norm(list(gradients), 2, dtype))


def _norm_on_cpu(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    # In one sweep fp32 loses digits on a CPU: 2e-4 of the norm at 8 million elements, 5e-3 at 67
    # million. The norm of rows' norms is within 2e-7 and takes the same time.
    flat = gradient.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([rows, rest.view(1)]))
    return norm


def combine_norms(norms: Sequence[Tensor]) -> Tensor:
    """The norm of a gradient from its parts' norms (0-d each): the root of their squares' sum."""
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack(list(norms))
    return torch.sqrt(torch.sum(stacked * stacked))


@dataclass(frozen=True, slots=True)
class Wire:
    """The conversion of a rank's gradients into what it sends.

    Incoming gradients are multiplied by `loss_scale`, reduced ones by `scale`. Both are 0-d
    float32, on the device. `dtype` is None if gradients travel unconverted.
    """

    dtype: torch.dtype | None
    loss_scale: Tensor
    scale: Tensor


def make_wire(
    clip: ClipSection,
    gradient_dtype: torch.dtype,
    allreduce_dtype: AllreduceDtype,
    loss_scale: Tensor,
) -> Wire:
    """The wire of a config, for gradients of `gradient_dtype`."""
    named = None if allreduce_dtype == "as_gradients" else DTYPES[allreduce_dtype]
    dtype = None if named == gradient_dtype else named
    if torch.float16 not in (gradient_dtype, dtype):
        scale = torch.ones_like(loss_scale)
    elif clips_before(clip):
        exponent = LARGEST_SUM_EXPONENT - math.ceil(math.log2(clip.max_norm))
        scale = torch.full_like(loss_scale, 2.0**exponent)
    elif gradient_dtype == torch.float16:
        scale = loss_scale
    else:
        scale = torch.full_like(loss_scale, 2.0**UNSCALED_LOSS_EXPONENT)
    return Wire(dtype, loss_scale, scale)


def plain_wire(device: torch.device) -> Wire:
    """A wire that converts nothing, for an unscaled loss."""
    one = torch.ones((), dtype=torch.float32, device=device)
    return Wire(None, one, one)


def multiply(gradient: Tensor, factor: Tensor, out: Tensor) -> None:
    """`out` = `gradient` * `factor`; `out` may be `gradient`, or have another dtype.

    `factor` is 0-d, float32 or float64. 16-bit gradients are multiplied in float32 and rounded
    once: torch would first round a 0-d factor to their dtype, where 1 / 1,024 of a small limit may
    be subnormal.
    """
    if gradient.dtype == factor.dtype == out.dtype:
        torch.mul(gradient, factor, out=out)
    else:
        torch.mul(gradient.view(-1), factor.view(1), out=out.view(-1))


@dataclass(frozen=True, slots=True)
class ClipOutcome:
    """The outcome of clipping in one update; all 0-d and on the device."""

    grad_norm: Tensor
    clipped_fraction: Tensor
    skip: Tensor  # float32, 1.0 if the update must be skipped: torch's `found_inf`
    gradient_factor: Tensor  # float32: the factor still to be applied to the gradients


@dataclass(frozen=True, slots=True)
class BucketGradients:
    """Gradients that are clipped and sent together."""

    contents: Sequence[Tensor]  # all elements: one flat buffer, or the gradients themselves
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]  # of the parameters, views of `contents`
    reduced: Tensor  # receives the reduced gradients, or this rank's part of them

    @property
    def numel(self) -> int:
        """Elements of the gradients, without padding."""
        return sum(parameter.numel() for parameter in self.parameters)


class ClipState:
    """The hook's state: limits, measurements of the current update, forwards already clipped.

    Args:
        clip: policy and its constants. Without clipping before the all-reduce, gradients are sent
            as `wire` says.
        parameters: all trained parameters of the model.
        world_size: ranks of the group; each sends its share already divided by it.
        forwards: forwards an update; used by `accumulation = "each_forward"` only.
        group: the model's process group, if not that of all ranks.
        wire: dtype and scale in which gradients travel, if converted.
    """

    def __init__(
        self,
        clip: ClipSection,
        parameters: Iterable[Tensor],
        world_size: int,
        *,
        forwards: int = 1,
        group: dist.ProcessGroup | None = None,
        wire: Wire | None = None,
    ) -> None:
        trained = [each for each in parameters if each.requires_grad]
        self._clip = clip
        self._wire = wire or plain_wire(trained[0].device)
        # Forwards are summed in the gradients' own dtype (config/run_config.py).
        assert clip.accumulation == "accumulated" or self._wire.dtype is None
        self._numel_total = sum(each.numel() for each in trained)
        self._world_size = world_size
        self._limits_an_update = forwards if clip.accumulation == "each_forward" else 1
        self._group = group
        self._is_last_forward = True
        self._held: list[BucketGradients] = []
        self._put_aside: dict[Tensor, Tensor] = {}
        self._start_update()

    def _start_update(self) -> None:
        self._norms: list[Tensor] = []  # of the current forward
        self._forward_norms: list[Tensor] = []
        self._clipped: list[Tensor] = []
        self._reduced: list[Tensor] = []
        self._poison: Tensor | float = 0.0  # NaN once a stored forward's norm was not finite

    def begin_forward(self, *, is_last: bool) -> None:
        """Under "each_forward", tell before each forward whether it is the update's last.

        Every forward and backward must then run outside `no_sync`, so that the hook runs. It clips
        each, stores all but the last, and sends the sum with the last.
        """
        self._is_last_forward = is_last

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Take one bucket of a backward; the future holds its mean over the ranks.

        `whole_before_allreduce` holds all buckets until the last one, when the norm is known. No
        backward remains to overlap with, so the last call waits for the all-reduces (on a GPU: its
        stream does), and no future stays open that an error could leave so for ever.
        """
        buffer = bucket.buffer()
        ready = self.take(
            BucketGradients([buffer], bucket.parameters(), bucket.gradients(), buffer),
            ends_forward=bucket.is_last(),
        )
        futures = [self._send(taken, sent) for taken, sent in ready]
        if len(ready) == 1 and ready[0][0].reduced is buffer:
            return futures[0]
        for future in futures:
            future.wait()
        return _completed(buffer)

    def take(
        self, bucket: BucketGradients, *, ends_forward: bool
    ) -> list[tuple[BucketGradients, Tensor]]:
        """Clip a bucket of a backward and divide it by the ranks.

        Returns pairs of a bucket and the tensor to send: none while buckets are held, one, or all
        that were held, in order of arrival. In a forward that is not the update's last the result
        is stored and zeros remain; the last one adds it.
        """
        self._held.append(bucket)
        if self._clip.policy == "whole_before_allreduce" and not ends_forward:
            return []
        held, self._held = self._held, []
        # The stored result has no padding, which may be all that a rank receives of a bucket.
        factor = self._factor(held) + self._poison
        if not self._is_last_forward:
            self._poison = 0 * factor
        sent = [self._multiply(each, factor) for each in held]
        if ends_forward and self._norms:
            self._forward_norms.append(combine_norms(self._norms))
            self._norms = []
        for each in held:
            self._exchange_with_put_aside(each)
        return list(zip(held, sent, strict=True)) if self._is_last_forward else []

    def finish(self) -> ClipOutcome:
        """The outcome since the last call; call it once everything sent has arrived.

        `grad_norm` is this rank's own, before clipping: the root of the sum of its buckets' squared
        norms; under "each_forward" the sum of the forwards' norms. `clipped_fraction` counts
        buckets clipped one by one, or whole gradients. The first element of a reduced bucket shows
        whether a rank poisoned it: a poisoned bucket is NaN throughout, and a sum of contributions
        each within limit / N cannot overflow (`make_wire`). Only for policies that clip before the
        all-reduce.
        """
        poisoned = ~torch.isfinite(torch.stack([each.float() for each in self._reduced])).all()
        outcome = ClipOutcome(
            grad_norm=torch.stack(self._forward_norms).sum(),
            clipped_fraction=torch.stack(self._clipped).float().mean(),
            skip=poisoned.float(),
            gradient_factor=1 / self._wire.scale,
        )
        self._start_update()
        return outcome

    def _factor(self, together: Sequence[BucketGradients]) -> Tensor:
        """The factor of the buckets before they travel; measures their norm if they are clipped."""
        rescale = self._wire.scale / self._wire.loss_scale / self._world_size
        if not clips_before(self._clip):
            return rescale
        norm = gradient_norm([tensor for bucket in together for tensor in bucket.contents])
        norm = norm / self._wire.loss_scale
        numel = sum(bucket.numel for bucket in together)
        limit = limit_before_allreduce(self._clip, numel, self._numel_total)
        limit /= self._limits_an_update
        self._norms.append(norm)
        self._clipped.append(norm > limit)
        return limit_factor(norm, limit) * rescale

    def _multiply(self, bucket: BucketGradients, factor: Tensor) -> Tensor:
        """The tensor to send of a bucket; on one rank, which sends nothing, all its contents."""
        sent = bucket.contents[0]
        if self._wire.dtype is not None:
            in_place = (
                bucket.reduced.dtype == self._wire.dtype and bucket.reduced.shape == sent.shape
            )
            sent = bucket.reduced if in_place else torch.empty_like(sent, dtype=self._wire.dtype)
            multiply(bucket.contents[0], factor, sent)
            return sent
        for tensor in bucket.contents:
            multiply(tensor, factor, tensor)
        return sent

    def _exchange_with_put_aside(self, bucket: BucketGradients) -> None:
        # By parameter, not by bucket: the first update's buckets are rebuilt after one forward.
        if not self._is_last_forward:
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
                if parameter in self._put_aside:
                    self._put_aside[parameter] += gradient
                else:
                    self._put_aside[parameter] = gradient.clone()
            torch._foreach_zero_(list(bucket.contents))
            return
        if self._put_aside:
            earlier = [self._put_aside.pop(parameter) for parameter in bucket.parameters]
            torch._foreach_add_(list(bucket.gradients), earlier)
        if clips_before(self._clip):
            self._reduced.append(bucket.reduced[(0,) * bucket.reduced.dim()])

    def _send(self, bucket: BucketGradients, sent: Tensor) -> torch.futures.Future[Tensor]:
        work: Work = dist.all_reduce(sent, group=self._group, async_op=True)
        future = work.get_future()
        if sent is bucket.reduced:
            return future.then(_first_value)
        return future.then(lambda done: bucket.reduced.copy_(done.value()[0]))


# The hook for `register_comm_hook(state, clip_hook)` of a DistributedDataParallel model.
clip_hook = ClipState.on_bucket


def _first_value(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    return done.value()[0]


def _completed(tensor: Tensor) -> torch.futures.Future[Tensor]:
    devices: list[int | str | torch.device] | None = (
        [tensor.device] if tensor.device.type == "cuda" else None
    )
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(tensor)
    return future


class Clipping(Protocol):
    """Clipping of an update whose forwards and backwards run in its contexts."""

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """The context of one forward and its backward."""

    def finish(self) -> ClipOutcome:
        """Finish after the last forward: the gradients are then final, but for a factor."""


def make_clipping(
    clip: ClipSection,
    model: nn.Module,
    wire: Wire,
    *,
    forwards: int = 1,
    bucket_cap_mb: float = DEFAULT_CAP_MB,
) -> Clipping:
    """The policy of a config for `model`, bare or wrapped in DistributedDataParallel.

    A wrapped model gets a hook if the policy clips before the all-reduce or the wire changes the
    dtype; it keeps its buckets. `bucket_cap_mb` (MiB) cuts those of a bare one.
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
    """`after_allreduce` and `none`: the norm and the result are equal on all ranks.

    `scale` (0-d) is the factor by which the averaged gradients are too large.
    """

    def __init__(self, clip: ClipSection, model: nn.Module, scale: Tensor) -> None:
        self._clip = clip
        self._model = model
        self._scale = scale

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients add up; the last backward averages them over the ranks."""
        return _local_but_for_the_last(self._model, is_last)

    def finish(self) -> ClipOutcome:
        """Limit the norm of the averaged gradient, or only measure it."""
        gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
        return outcome_after(self._clip, gradient_norm(gradients), self._scale)


def outcome_after(clip: ClipSection, norm: Tensor, scale: Tensor) -> ClipOutcome:
    """The outcome of `after_allreduce` or `none` for the averaged gradient's norm.

    Args:
        norm: 0-d, norm of gradients that are `scale` (0-d) times too large.
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
        """A context: under "each_forward" every backward reaches the hook, else the last only."""
        if not self._each_forward:
            return _local_but_for_the_last(self._ddp, is_last)
        self._state.begin_forward(is_last=is_last)
        return contextlib.nullcontext()

    def finish(self) -> ClipOutcome:
        """The hook's outcome."""
        return self._state.finish()


class ClipOnOneRank:
    """The same policies without an all-reduce: `whole_before_allreduce` is `after_allreduce` here.

    Buckets are planned as in DistributedDataParallel, assuming that gradients become ready in the
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
        self._buckets = [[trained[name] for name in names] for names in planned]
        self._each_forward = clip.accumulation == "each_forward"
        self._state = ClipState(clip, trained.values(), 1, forwards=forwards, wire=wire)

    @contextlib.contextmanager
    def forward(self, *, is_last: bool) -> Iterator[None]:
        """A context that clips after the backward, where the hook would."""
        yield
        if is_last or self._each_forward:
            self._state.begin_forward(is_last=is_last)
            for number, bucket in enumerate(self._buckets, 1):
                self._state.take(_with_gradients(bucket), ends_forward=number == len(self._buckets))

    def finish(self) -> ClipOutcome:
        """The outcome of clipping."""
        return self._state.finish()


def _with_gradients(parameters: Sequence[nn.Parameter]) -> BucketGradients:
    gradients = [each.grad for each in parameters if each.grad is not None]
    return BucketGradients(gradients, parameters, gradients, gradients[0])


def _local_but_for_the_last(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    ddp = model if isinstance(model, DistributedDataParallel) else None
    return contextlib.nullcontext() if is_last or ddp is None else ddp.no_sync()
