"""Clip policies for gradient buckets, which also work under DistributedDataParallel.

N is the number of ranks, g_i the gradient of rank i, g_ib its part in bucket b, C = max_norm, and
limit(x, c) = x * min(1, c / ||x||) in the L2 norm. The policies compute:

- `none`: mean_i g_i
- `after_allreduce`: limit(mean_i g_i, C)
- `whole_before_allreduce`: mean_i limit(g_i, C)
- `bucket_before_allreduce`: mean_i limit(g_ib, C_b) in each bucket b

The setting `clip.bucket_limit` selects the limit C_b of a bucket:

- `by_size`: C_b = C * sqrt(numel_b / numel_total), so that sum_b C_b^2 = C^2 for any buckets
- `equal_share`: C_b = C / sqrt(22), as published. The number 22 is fixed because
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
    """Return True if the policy clips each rank's gradients before the all-reduce."""
    return clip.policy not in CLIPPED_TOGETHER


def limit_before_allreduce(clip: ClipSection, numel: int, numel_total: int) -> float:
    """Return the norm limit of gradients with `numel` of the model's `numel_total` elements.

    The module's docstring defines the limits C of a whole gradient and C_b of a bucket.
    """
    if clip.policy == "whole_before_allreduce":
        return clip.max_norm
    if clip.bucket_limit == "equal_share":
        return clip.max_norm / math.sqrt(PUBLISHED_BUCKETS)
    return clip.max_norm * math.sqrt(numel / numel_total)


def limit_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return min(1, max_norm / norm), 0-d like `norm`, and exactly 1 for norms within the limit.

    If the norm is not finite, the factor is NaN, so that all elements become NaN. Otherwise, finite
    elements whose norm overflows would become zeros, and the other ranks would not notice the
    overflow.
    """
    # torch divides a number by a tensor as a product with the reciprocal, which is rounded twice.
    factor = (torch.full_like(norm, max_norm) / norm).clamp(max=1)
    return torch.where(torch.isfinite(norm), factor, torch.nan)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients together, 0-d, on their device, in at least float32."""
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
    """Return the L2 norm of a gradient, 0-d, computed from the 0-d norms of its parts."""
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack(list(norms))
    return torch.sqrt(torch.sum(stacked * stacked))


def wire_dtype(gradient_dtype: torch.dtype, allreduce_dtype: AllreduceDtype) -> torch.dtype | None:
    """Return the dtype to which sent gradients are converted, or None if they keep their own."""
    is_converted = allreduce_dtype == "bf16" and gradient_dtype != torch.bfloat16
    return torch.bfloat16 if is_converted else None


def multiply(gradient: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write `gradient` * `factor` to `out`, which may be `gradient` itself or have another dtype.

    `factor` is 0-d, float32 or float64. 16-bit gradients are multiplied in float32 and rounded
    once. By default, torch would first round a 0-d factor to the 16-bit dtype. In float16, a small
    factor, such as a small limit divided by 1,024 ranks, may be subnormal and lose precision.
    """
    if gradient.dtype == factor.dtype == out.dtype:
        torch.mul(gradient, factor, out=out)
    else:
        torch.mul(gradient.view(-1), factor.view(1), out=out.view(-1))


@dataclass(frozen=True, slots=True)
class ClipOutcome:
    """The result of clipping one update's gradients, as 0-d tensors on the gradients' device."""

    grad_norm: Tensor
    clipped_fraction: Tensor
    skip: Tensor  # float32, 1.0 if the update must be skipped, like torch's `found_inf`
    gradient_factor: Tensor  # float32, the factor that must still be applied to the gradients


@dataclass(frozen=True, slots=True)
class BucketGradients:
    """The gradients of one bucket, which are clipped and sent together."""

    contents: Sequence[Tensor]  # all elements, as one flat buffer or as the gradients themselves
    parameters: Sequence[Tensor]
    reduced: Tensor  # receives the reduced gradients, or this rank's part of them

    @property
    def numel(self) -> int:
        """The number of elements of the bucket's gradients, without padding."""
        return sum(parameter.numel() for parameter in self.parameters)


class ClipState:
    """The norm limits of gradients, and the norms that were measured in the current update.

    DistributedDataParallel's communication hook uses this object as its state. The object is also
    used without the hook.

    Args:
        clip: the policy and its constants. If the policy does not clip before the all-reduce,
            gradients are only divided by the number of ranks and converted to `wire`.
        parameters: all trained parameters of the model.
        world_size: the number of ranks of the group. Each rank divides its gradients by this number
            before it sends them.
        group: the model's process group, or None for the group of all ranks.
        wire: the dtype in which gradients are sent, or None to send them in their own dtype.
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

        `whole_before_allreduce` keeps all buckets until the last one, because the norm of the whole
        gradient is unknown until then. At that point there is no computation left to overlap with,
        so the last call waits for the all-reduces. (On a GPU, the stream waits instead of the
        host.) The earlier calls return completed futures, because other futures would never
        complete after an error.
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
        `whole_before_allreduce` returns an empty list until the last bucket, and then the pairs of
        all buckets. With the other policies, each call returns one pair.
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
        """Return the outcome of clipping the buckets that arrived since the last call.

        Call this method only for policies that clip before the all-reduce, after all sent buckets
        have arrived. `grad_norm` is this rank's own norm before clipping, over all its buckets.
        `clipped_fraction` is the fraction of buckets that were clipped. For
        `whole_before_allreduce`, it is the fraction of whole gradients.

        The method checks only the first element of each reduced bucket, because a rank that sends
        NaN makes the whole bucket NaN. A bucket without NaN cannot have overflowed, because it is a
        sum of N contributions from N ranks, and the norm of each contribution is at most limit / N.
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
        """Return the factor by which buckets are multiplied before they are sent.

        If the policy clips before the all-reduce, the method also records the buckets' common norm.
        """
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

        With several ranks, the contents are one flat tensor. With one rank nothing is sent, and the
        contents may be several tensors.
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
    """The interface of all classes that clip the gradients of an update.

    Each micro-batch of the update runs inside the context that `forward` returns.
    """

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context manager for the forward and backward pass of one micro-batch.

        `is_last` is True for the last micro-batch of the update.
        """

    def finish(self) -> ClipOutcome:
        """Finish the update after its last micro-batch, and return the outcome of clipping.

        The gradients are then final, except that the caller must still multiply them by the
        outcome's `gradient_factor`.
        """


def make_clipping(
    clip: ClipSection,
    model: nn.Module,
    wire: torch.dtype | None = None,
    *,
    bucket_cap_mb: float = DEFAULT_CAP_MB,
) -> Clipping:
    """Create the object that clips by the policy of `clip`, for a model with or without DDP.

    If DistributedDataParallel (DDP) wraps the model, DDP keeps its own buckets. The function
    registers a communication hook if the policy clips before the all-reduce, or if gradients are
    converted to `wire`. If the model is not wrapped, `bucket_cap_mb` limits the size of its
    buckets, in MiB.
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
    """Clipping for the policies `after_allreduce` and `none`, which use the averaged gradient.

    The norm and the result are therefore equal on all ranks.
    """

    def __init__(self, clip: ClipSection, model: nn.Module) -> None:
        self._clip = clip
        self._model = model

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context manager in which backward passes accumulate gradients.

        The last backward pass of an update averages the gradients over the ranks.
        """
        return _sync_if_last(self._model, is_last)

    def finish(self) -> ClipOutcome:
        """Return the outcome of clipping the averaged gradient.

        The policy `after_allreduce` limits the gradient's norm, and `none` only measures it.
        """
        gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
        return outcome_after(self._clip, gradient_norm(gradients))


def outcome_after(clip: ClipSection, norm: Tensor) -> ClipOutcome:
    """Return the outcome of `after_allreduce` or `none`, given the averaged gradient's 0-d norm."""
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
    """Clipping for the policies that clip in DistributedDataParallel's communication hook."""

    def __init__(self, ddp: DistributedDataParallel, state: ClipState) -> None:
        self._ddp = ddp
        self._state = state

    def forward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context manager in which backward passes accumulate gradients.

        The last backward pass of an update calls the communication hook, which clips and averages
        the gradients.
        """
        return _sync_if_last(self._ddp, is_last)

    def finish(self) -> ClipOutcome:
        """Return the outcome of clipping, which the communication hook has recorded."""
        return self._state.finish()


class ClipOnOneRank:
    """Clipping for a run of one rank, if the policy would clip before the all-reduce.

    One rank needs no all-reduce, so `whole_before_allreduce` equals `after_allreduce`. The buckets
    are planned as in DistributedDataParallel, on the assumption that gradients become ready in the
    reverse order of the parameters.
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
        """Return a context manager that clips the gradients after the last backward pass.

        The result equals that of DistributedDataParallel's communication hook.
        """
        yield
        if is_last:
            for number, bucket in enumerate(self._buckets, 1):
                ends_backward = number == len(self._buckets)
                self._state.take(_with_gradients(bucket), ends_backward=ends_backward)

    def finish(self) -> ClipOutcome:
        """Return the outcome of clipping the update's gradients."""
        return self._state.finish()


def _with_gradients(parameters: Sequence[nn.Parameter]) -> BucketGradients:
    gradients = [each.grad for each in parameters if each.grad is not None]
    return BucketGradients(gradients, parameters, gradients[0])


class SumInFp32:
    """A `Clipping` that sums the gradients of micro-batches in fp32 if they have 16 bits.

    Sums in bf16 would be rounded after each micro-batch, and terms of less than 1/256 of a sum
    would have no effect. Here, only the sum of all micro-batches is rounded. Create the object
    before the other `clipping` and before DistributedDataParallel, so that its hooks run first.
    """

    clipping: Clipping

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._is_last = True
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._on_gradient
            )

    @contextlib.contextmanager
    def forward(self, *, is_last: bool) -> Iterator[None]:
        """Return the context manager of `clipping`, which sees gradients only if `is_last`."""
        self._is_last = is_last
        with self.clipping.forward(is_last=is_last):
            yield
            if is_last:  # What is left had no gradient in the last micro-batch.
                for parameter, total in self._sums.items():
                    parameter.grad = total.to(parameter.dtype)
                self._sums.clear()

    def finish(self) -> ClipOutcome:
        """Return the outcome of `clipping`."""
        return self.clipping.finish()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        gradient, total = parameter.grad, self._sums.pop(parameter, None)
        if gradient is None or (self._is_last and total is None):
            return
        total = gradient.float() if total is None else total.add_(gradient)
        if self._is_last:
            gradient.copy_(total)
        else:
            self._sums[parameter], parameter.grad = total, None


def _sync_if_last(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Return a context in which DistributedDataParallel communicates only if `is_last` is True."""
    ddp = model if isinstance(model, DistributedDataParallel) else None
    return contextlib.nullcontext() if is_last or ddp is None else ddp.no_sync()
