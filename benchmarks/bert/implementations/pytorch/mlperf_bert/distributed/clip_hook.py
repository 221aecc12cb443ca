"""A communication hook for any DistributedDataParallel model: clip before the all-reduce.

    state = ClipState(ClipSection(policy="bucket_before_allreduce"), model.parameters(), world_size)
    ddp.register_comm_hook(state, clip_hook)

and `state.finish()` after each backward that reduced (docs/clip_hook.md). The host never waits for
the device. A rank whose gradient has no finite norm sends NaN in place of the bucket; every rank
finds it in what it received, so all skip the same step without another collective.

Under its limit a bucket that travels in its own dtype is multiplied by 1 / N alone, which is what
DistributedDataParallel does by itself: the result is the same, bit for bit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket, Work

from mlperf_bert.config.sections import ClipSection
from mlperf_bert.distributed.clip_policies import (
    clips_before,
    combine_norms,
    gradient_norm,
    limit_before_allreduce,
    limit_factor,
)
from mlperf_bert.distributed.wire import Wire, multiply, plain_wire


@dataclass(frozen=True, slots=True)
class ClipOutcome:
    """What clipping found in one update; all 0-d and on the device."""

    grad_norm: Tensor
    clipped_fraction: Tensor
    skip: Tensor  # float32, 1.0 where the update must not be made: torch's `found_inf`
    gradient_factor: Tensor  # float32: what the gradients are still to be multiplied by


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are clipped and sent together."""

    contents: Sequence[Tensor]  # all elements: one flat buffer, or the gradients themselves
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]  # of the parameters, views of `contents`
    reduced: Tensor  # where the reduced gradients, or this rank's part of them, will be

    @property
    def numel(self) -> int:
        """Elements of the gradients, without padding."""
        return sum(parameter.numel() for parameter in self.parameters)


class ClipState:
    """The hook's state: limits, measures of the update under way, forwards already clipped.

    Args:
        clip: policy and its constants. A policy that does not clip before the all-reduce has its
            gradients sent as `wire` says.
        parameters: all that the model trains.
        world_size: ranks of the group; each sends its share already divided by it.
        forwards: forwards an update; matters to `accumulation = "each_forward"` alone.
        group: the model's process group, if not that of all ranks.
        wire: dtype and scale in which gradients travel, if not as they are.
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
        # A sum of forwards is put together in the gradients' own dtype (config_checks.py).
        assert clip.accumulation == "accumulated" or self._wire.dtype is None
        self._numel_total = sum(each.numel() for each in trained)
        self._world_size = world_size
        self._limits_an_update = forwards if clip.accumulation == "each_forward" else 1
        self._group = group
        self._is_last_forward = True
        self._held: list[Bucket] = []
        self._put_aside: dict[Tensor, Tensor] = {}
        self._start_update()

    def _start_update(self) -> None:
        self._norms: list[Tensor] = []  # of the forward under way
        self._forward_norms: list[Tensor] = []
        self._clipped: list[Tensor] = []
        self._reduced: list[Tensor] = []
        self._poison: Tensor | float = 0.0  # NaN once a forward put aside had no finite norm

    def begin_forward(self, *, is_last: bool) -> None:
        """Under "each_forward", say before each forward whether it is the update's last.

        Every forward and backward is then done outside `no_sync`: the hook must run. It clips all,
        keeps what is not the last, and sends the sum with the last.
        """
        self._is_last_forward = is_last

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Take one bucket of a backward; the future holds its mean over the ranks.

        `whole_before_allreduce` has to hold all buckets until the last one is here: only then is
        the norm known. Nothing of the backward is left to overlap with, so the all-reduces are
        waited for in the last call (on a GPU: by its stream), and no future is left open that an
        error could leave so for ever.
        """
        buffer = bucket.buffer()
        ready = self.take(
            Bucket([buffer], bucket.parameters(), bucket.gradients(), buffer),
            ends_forward=bucket.is_last(),
        )
        futures = [self._send(taken, sent) for taken, sent in ready]
        if len(ready) == 1 and ready[0][0].reduced is buffer:
            return futures[0]
        for future in futures:
            future.wait()
        return _completed(buffer)

    def take(self, bucket: Bucket, *, ends_forward: bool) -> list[tuple[Bucket, Tensor]]:
        """One bucket of a backward: those that are to be sent now, each with what to send.

        None, one, or all that were held, in the order in which they came.
        """
        self._held.append(bucket)
        if self._clip.policy == "whole_before_allreduce" and not ends_forward:
            return []
        held, self._held = self._held, []
        sent = self.clip(held, ends_forward=ends_forward)
        return list(zip(held, sent, strict=True)) if self._is_last_forward else []

    def clip(self, buckets: Sequence[Bucket], *, ends_forward: bool) -> list[Tensor]:
        """Clip and divide by the ranks: one bucket, or all of a forward at once; what to send.

        Of a forward that is not the update's last, the result is put aside and zeros remain; with
        the last, it is added.
        """
        whole = self._clip.policy == "whole_before_allreduce"
        sent: list[Tensor] = []
        for together in [buckets] if whole else [[bucket] for bucket in buckets]:
            # What is put aside has no padding, which may be all that a rank receives of a bucket.
            factor = self._factor(together) + self._poison
            if not self._is_last_forward:
                self._poison = 0 * factor
            for bucket in together:
                sent.append(self._multiply(bucket, factor))
        if ends_forward and self._norms:
            self._forward_norms.append(combine_norms(self._norms))
            self._norms = []
        for bucket in buckets:
            self._exchange_with_put_aside(bucket)
        return sent

    def finish(self) -> ClipOutcome:
        """What was found since the last call, once all that was sent has arrived.

        `grad_norm` is this rank's own, before clipping: the root of the sum of its buckets' squared
        norms; under "each_forward" the sum of the forwards' norms. `clipped_fraction`: of all
        buckets clipped one by one, or of whole gradients. The first element of a reduced bucket
        says whether a rank poisoned it: a poisoned bucket is NaN throughout, and a sum of
        contributions each within limit / N cannot overflow (wire.py). For policies that clip before
        the all-reduce only.
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

    def _factor(self, together: Sequence[Bucket]) -> Tensor:
        """What the buckets are multiplied by before they travel; takes their norm where clipped."""
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

    def _multiply(self, bucket: Bucket, factor: Tensor) -> Tensor:
        """What to send of a bucket; on one rank, where it is not sent, all its contents."""
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

    def _exchange_with_put_aside(self, bucket: Bucket) -> None:
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

    def _send(self, bucket: Bucket, sent: Tensor) -> torch.futures.Future[Tensor]:
        work: Work = dist.all_reduce(sent, group=self._group, async_op=True)
        future = work.get_future()
        if sent is bucket.reduced:
            return future.then(_first_value)
        return future.then(lambda done: bucket.reduced.copy_(done.value()[0]))


def clip_hook(state: ClipState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """What `register_comm_hook(state, clip_hook)` of a DistributedDataParallel model takes."""
    return state.on_bucket(bucket)


def _first_value(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    return done.value()[0]


def _completed(tensor: Tensor) -> torch.futures.Future[Tensor]:
    devices: list[int | str | torch.device] | None = (
        [tensor.device] if tensor.device.type == "cuda" else None
    )
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(tensor)
    return future
