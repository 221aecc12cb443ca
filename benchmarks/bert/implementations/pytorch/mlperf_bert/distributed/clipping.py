"""Clip policies for gradient buckets, which also work under DistributedDataParallel.

N is the number of ranks, g_i the gradient of rank i, g_ib its part in bucket b, C = max_norm, and
limit(x, c) = x * min(1, c / ||x||) in the L2 norm. The policies compute:

- `none`: mean_i g_i
- `after_allreduce`: limit(mean_i g_i, C)
- `whole_before_allreduce`: mean_i limit(g_i, C)
- `bucket_before_allreduce`: mean_i limit(g_ib, C_b) in each bucket b

The limit C_b of a bucket is set by `clip.bucket_limit`:

- `by_size`: C_b = C * sqrt(numel_b / numel_total), so that sum_b C_b^2 = C^2 for any buckets
- `equal_share`: C_b = C / sqrt(22), as published. The count is fixed because
  DistributedDataParallel starts with one bucket, and its later number of buckets depends on dtype
  and layout.

With several micro-batches per update, g_i is the sum of their gradients.

Sources: arXiv 2402.02447 for `bucket_before_allreduce`, and the BERT reference of the MLPerf
Training rules for `after_allreduce`.

Any DistributedDataParallel model can use the policies through a communication hook, as
docs/concepts/clipping.md explains:

    state = ClipState(ClipSection(policy="bucket_before_allreduce"), model.parameters(), world_size)
    ddp.register_comm_hook(state, clip_hook)

Call `state.finish()` after each backward pass that reduced the gradients. The host never waits for
the device. A rank whose gradient norm is not finite sends NaN instead of the bucket. Every rank
receives the NaN, so all ranks skip the same step without another collective. A bucket that is below
its limit and is sent in its own dtype is only multiplied by 1 / N. DistributedDataParallel does the
same by itself, so the results are equal bit-for-bit.

docs/concepts/numerics.md, "Summing gradients in 16 bits", describes the sums over ranks in 16 bits.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, Work
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config.sections import CLIPPED_TOGETHER, AllreduceDtype, ClipSection
from mlperf_bert.distributed.bucket_plan import DEFAULT_CAP_MB, plan_in_reverse

PUBLISHED_BUCKETS = 22  # number of buckets in the published runs that used `equal_share`
_ROW = 1024  # elements whose norm a CPU computes at a time


def clips_before(clip: ClipSection) -> bool:
    """Return True if the policy clips the gradients of each rank before the all-reduce."""
    return clip.policy not in CLIPPED_TOGETHER


def limit_before_allreduce(clip: ClipSection, numel: int, numel_total: int) -> float:
    """Return the limit, C or C_b, for `numel` of the model's `numel_total` elements."""
    if clip.policy == "whole_before_allreduce":
        return clip.max_norm
    if clip.bucket_limit == "equal_share":
        return clip.max_norm / math.sqrt(PUBLISHED_BUCKETS)
    return clip.max_norm * math.sqrt(numel / numel_total)


def limit_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return min(1, max_norm / norm), which is exactly 1 within the limit, 0-d like `norm`.

    The factor is NaN if the norm is not finite, so that the whole bucket becomes NaN. Otherwise,
    finite elements whose norm overflows would become zeros, and the other ranks would not notice.
    """
    return torch.where(torch.isfinite(norm), max_norm / norm.clamp(min=max_norm), torch.nan)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm over all tensors together, 0-d, on their device.

    The norm of 16-bit gradients is computed in fp32.
    """
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    if gradients[0].device.type == "cpu":
        return combine_norms([_norm_on_cpu(each, dtype) for each in gradients])
    return combine_norms(torch._foreach_norm(list(gradients), 2, dtype))


def _norm_on_cpu(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    # A single pass in fp32 is inaccurate on a CPU. Its relative error is 2e-4 for 8 million
    # elements and 5e-3 for 67 million. Combining the norms of rows is as fast, and its error is
    # below 2e-7.
    flat = gradient.reshape(-1)
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([rows, rest.view(1)]))
    return norm


def combine_norms(norms: Sequence[Tensor]) -> Tensor:
    """Return the norm of a gradient, 0-d, from the norms of its parts, 0-d each."""
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack(list(norms))
    return torch.sqrt(torch.sum(stacked * stacked))


def wire_dtype(gradient_dtype: torch.dtype, allreduce_dtype: AllreduceDtype) -> torch.dtype | None:
    """Return the dtype in which gradients are sent, or None if they are not converted."""
    is_converted = allreduce_dtype == "bf16" and gradient_dtype != torch.bfloat16
    return torch.bfloat16 if is_converted else None


def multiply(gradient: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write `gradient` * `factor` to `out`, which may be `gradient` or have another dtype.

    `factor` is 0-d, float32 or float64. 16-bit gradients are multiplied in float32 and rounded
    once. torch by itself would first round a 0-d factor to their dtype. There, a small factor, such
    as a small limit divided by 1,024 ranks, may be subnormal and lose precision.
    """
    if gradient.dtype == factor.dtype == out.dtype:
        torch.mul(gradient, factor, out=out)
    else:
        torch.mul(gradient.view(-1), factor.view(1), out=out.view(-1))


@dataclass(frozen=True, slots=True)
class ClipOutcome:
    """The outcome of clipping in one update. All tensors are 0-d and on the device."""

    grad_norm: Tensor
    clipped_fraction: Tensor
    skip: Tensor  # float32, 1.0 if the update must be skipped, like torch's `found_inf`
    gradient_factor: Tensor  # float32, the factor that must still be applied to the gradients


@dataclass(frozen=True, slots=True)
class BucketGradients:
    """Gradients that are clipped and sent together."""

    contents: Sequence[Tensor]  # all elements, as one flat buffer or as the gradients themselves
    parameters: Sequence[Tensor]
    reduced: Tensor  # receives the reduced gradients, or this rank's part of them

    @property
    def numel(self) -> int:
        """The number of elements of the gradients, without padding."""
        return sum(parameter.numel() for parameter in self.parameters)


class ClipState:
    """The state of the hook, with its limits and the measurements of the current update.

    Args:
        clip: the policy and its constants. If the policy does not clip before the all-reduce,
            gradients are only divided by the number of ranks and converted to `wire`.
        parameters: all trained parameters of the model.
        world_size: the number of ranks of the group. Each rank divides its gradients by this number
            before it sends them.
        group: the model's process group, or None for the group of all ranks.
        wire: the dtype in which gradients are sent, or None for their own.
    """

    def __init__(
        self,
        clip: ClipSection,
        parameters: Iterable[Tensor],
        world_size: int,
        *,
        group: dist.ProcessGroup | None = None,
        wire: torch.dtype | None = None,
    ) -> None:
        trained = [each for each in parameters if each.requires_grad]
        self._clip = clip
        self._wire = wire
        self._numel_total = sum(each.numel() for each in trained)
        self._share = torch.full((), 1 / world_size, dtype=torch.float32, device=trained[0].device)
        self._group = group
        self._held: list[BucketGradients] = []
        self._start_update()

    def _start_update(self) -> None:
        self._norms: list[Tensor] = []
        self._clipped: list[Tensor] = []
        self._reduced: list[Tensor] = []

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Process one bucket of a backward pass, and return a future of its mean over the ranks.

        `whole_before_allreduce` keeps all buckets until the last one, because only then is the norm
        known. At that point there is no computation left to overlap with, so the last call waits
        for the all-reduces. (On a GPU, only its stream waits.) The calls before it return completed
        futures, because an error could leave an open future unfinished forever.
        """
        buffer = bucket.buffer()
        ready = self.take(
            BucketGradients([buffer], bucket.parameters(), buffer), ends_backward=bucket.is_last()
        )
        futures = [self._send(clipped, sent) for clipped, sent in ready]
        if len(ready) == 1 and ready[0][0].reduced is buffer:
            return futures[0]
        for future in futures:
            future.wait()
        return _completed(buffer)

    def take(
        self, bucket: BucketGradients, *, ends_backward: bool
    ) -> list[tuple[BucketGradients, Tensor]]:
        """Clip a bucket of a backward pass and divide it by the number of ranks.

        Returns pairs of a bucket and the tensor to send, in the order in which the buckets arrived.
        `whole_before_allreduce` returns no pairs until the last bucket, and then all of them. The
        other policies return one pair.
        """
        self._held.append(bucket)
        if self._clip.policy == "whole_before_allreduce" and not ends_backward:
            return []
        held, self._held = self._held, []
        factor = self._factor(held)
        sent = [self._multiply(each, factor) for each in held]
        if clips_before(self._clip):
            self._reduced += [each.reduced[(0,) * each.reduced.dim()] for each in held]
        return list(zip(held, sent, strict=True))

    def finish(self) -> ClipOutcome:
        """Return the outcome since the last call. Call it after all sent buckets have arrived.

        Call it only for policies that clip before the all-reduce. `grad_norm` is this rank's own
        norm before clipping, over all its buckets. `clipped_fraction` counts buckets, or whole
        gradients for `whole_before_allreduce`.

        A rank that sends NaN makes the whole reduced bucket NaN, so checking its first element is
        enough. A bucket without NaN cannot have overflowed, because it is a sum of N contributions
        that are each within limit / N.
        """
        has_nan = ~torch.isfinite(torch.stack([each.float() for each in self._reduced])).all()
        outcome = ClipOutcome(
            grad_norm=combine_norms(self._norms),
            clipped_fraction=torch.stack(self._clipped).float().mean(),
            skip=has_nan.float(),
            gradient_factor=torch.ones_like(self._share),
        )
        self._start_update()
        return outcome

    def _factor(self, together: Sequence[BucketGradients]) -> Tensor:
        """Return the factor for buckets before they are sent, and record their norm if needed."""
        if not clips_before(self._clip):
            return self._share
        norm = gradient_norm([tensor for bucket in together for tensor in bucket.contents])
        numel = sum(bucket.numel for bucket in together)
        limit = limit_before_allreduce(self._clip, numel, self._numel_total)
        self._norms.append(norm)
        self._clipped.append(norm > limit)
        return limit_factor(norm, limit) * self._share

    def _multiply(self, bucket: BucketGradients, factor: Tensor) -> Tensor:
        """Multiply the contents of a bucket by `factor`, and return the tensor to send.

        The contents may be several tensors only on a single rank, which sends nothing.
        """
        sent = bucket.contents[0]
        if self._wire is not None:
            in_place = bucket.reduced.dtype == self._wire and bucket.reduced.shape == sent.shape
            sent = bucket.reduced if in_place else torch.empty_like(sent, dtype=self._wire)
            multiply(bucket.contents[0], factor, sent)
            return sent
        for tensor in bucket.contents:
            multiply(tensor, factor, tensor)
        return sent

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
    """The clipping of an update. Each of its micro-batches runs inside a `forward` context."""

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for the forward and backward pass of one micro-batch."""

    def finish(self) -> ClipOutcome:
        """Finish the update after its last micro-batch, and return the outcome.

        The gradients are then final, except for the outcome's factor.
        """


def make_clipping(
    clip: ClipSection,
    model: nn.Module,
    wire: torch.dtype | None = None,
    *,
    bucket_cap_mb: float = DEFAULT_CAP_MB,
) -> Clipping:
    """Create the clipping of a config for `model`, which DistributedDataParallel may wrap.

    A wrapped model keeps its own buckets. It gets a hook if the policy clips before the all-reduce,
    or if gradients are converted to `wire`. For a model that is not wrapped, `bucket_cap_mb` limits
    the size of the buckets in MiB.
    """
    ddp = model if isinstance(model, DistributedDataParallel) else None
    if not clips_before(clip):
        if ddp is not None and wire is not None:
            _register_hook(ddp, clip, wire)
        return ClipAfter(clip, model)
    if ddp is None:
        return ClipOnOneRank(clip, model, bucket_cap_mb)
    return ClipBefore(ddp, _register_hook(ddp, clip, wire))


def _register_hook(
    ddp: DistributedDataParallel, clip: ClipSection, wire: torch.dtype | None
) -> ClipState:
    group = ddp.process_group
    state = ClipState(clip, ddp.parameters(), group.size(), group=group, wire=wire)
    ddp.register_comm_hook(state, clip_hook)
    return state


class ClipAfter:
    """The policies `after_allreduce` and `none`, whose norm and result are equal on all ranks."""

    def __init__(self, clip: ClipSection, model: nn.Module) -> None:
        self._clip = clip
        self._model = model

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context that accumulates gradients.

        The last backward pass averages them over the ranks.
        """
        return _sync_if_last(self._model, is_last)

    def finish(self) -> ClipOutcome:
        """Limit the norm of the averaged gradient, or only measure it for `none`."""
        gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
        return outcome_after(self._clip, gradient_norm(gradients))


def outcome_after(clip: ClipSection, norm: Tensor) -> ClipOutcome:
    """Return the outcome of `after_allreduce` or `none` for the averaged gradient's 0-d norm."""
    limited = clip.policy == "after_allreduce"
    clipped = norm > clip.max_norm if limited else torch.zeros_like(norm)
    factor = limit_factor(norm, clip.max_norm) if limited else torch.ones_like(norm)
    return ClipOutcome(
        grad_norm=norm,
        clipped_fraction=clipped.float(),
        skip=(~torch.isfinite(norm)).float(),
        gradient_factor=factor.float(),
    )


class ClipBefore:
    """The policies that clip in DistributedDataParallel's communication hook."""

    def __init__(self, ddp: DistributedDataParallel, state: ClipState) -> None:
        self._ddp = ddp
        self._state = state

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context that accumulates gradients.

        The last backward pass calls the hook.
        """
        return _sync_if_last(self._ddp, is_last)

    def finish(self) -> ClipOutcome:
        """Return the outcome of the hook."""
        return self._state.finish()


class ClipOnOneRank:
    """The policies that clip before the all-reduce, on a single rank, which needs no all-reduce.

    Here `whole_before_allreduce` equals `after_allreduce`. The buckets are planned as in
    DistributedDataParallel, assuming that gradients become ready in the reverse order of the
    parameters.
    """

    def __init__(self, clip: ClipSection, model: nn.Module, bucket_cap_mb: float) -> None:
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        element_bytes = max(each.element_size() for each in trained.values())
        numel_by_name = {name: each.numel() for name, each in trained.items()}
        planned = plan_in_reverse(numel_by_name, element_bytes, bucket_cap_mb)
        self._buckets = [[trained[name] for name in names] for names in planned]
        self._state = ClipState(clip, trained.values(), 1)

    @contextlib.contextmanager
    def forward(self, *, is_last: bool) -> Iterator[None]:
        """Return a context that clips after the last backward pass, as the hook would."""
        yield
        if is_last:
            for number, bucket in enumerate(self._buckets, 1):
                ends_backward = number == len(self._buckets)
                self._state.take(_with_gradients(bucket), ends_backward=ends_backward)

    def finish(self) -> ClipOutcome:
        """Return the outcome of clipping."""
        return self._state.finish()


def _with_gradients(parameters: Sequence[nn.Parameter]) -> BucketGradients:
    gradients = [each.grad for each in parameters if each.grad is not None]
    return BucketGradients(gradients, parameters, gradients[0])


def _sync_if_last(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Return a context in which DistributedDataParallel communicates only if `is_last`."""
    ddp = model if isinstance(model, DistributedDataParallel) else None
    return contextlib.nullcontext() if is_last or ddp is None else ddp.no_sync()
