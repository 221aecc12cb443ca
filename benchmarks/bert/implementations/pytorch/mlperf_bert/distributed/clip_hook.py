"""A communication hook for any DistributedDataParallel model: clip before the all-reduce.

    state = ClipState(ClipSection(policy="bucket_before_allreduce"), model.parameters(), world_size)
    ddp.register_comm_hook(state, clip_hook)

and `state.finish()` after each backward that reduced (docs/clip_hook.md). The host never waits for
the device. A rank whose gradient has no finite norm sends NaN in place of the bucket; every rank
finds it in what it received, so all skip the same step without another collective.

Precision is the buckets' own; under its limit a bucket is multiplied by 1 / N alone, which is what
DistributedDataParallel does by itself: the result is the same, bit for bit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket, Work

from mlperf_bert.config import ClipSection
from mlperf_bert.distributed.clip_policies import (
    clip_together,
    combine_norms,
    limit_before_allreduce,
)


@dataclass(frozen=True, slots=True)
class ClipOutcome:
    """What clipping found in one update; all 0-d and on the device."""

    grad_norm: Tensor
    clipped_fraction: Tensor
    skip: Tensor  # float32, 1.0 where the update must not be made: torch's `found_inf`


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are clipped and sent together."""

    contents: Sequence[Tensor]  # all elements: one flat buffer, or the gradients themselves
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]  # of the parameters, views of `contents`


class ClipState:
    """The hook's state: limits, measures of the update under way, forwards already clipped.

    Args:
        clip: policy `whole_before_allreduce` or `bucket_before_allreduce`, and its constants.
        parameters: all that the model trains.
        world_size: ranks of the group; each sends its share already divided by it.
        forwards: forwards an update; matters to `accumulation = "each_forward"` alone.
        group: the model's process group, if not that of all ranks.
    """

    def __init__(
        self,
        clip: ClipSection,
        parameters: Iterable[Tensor],
        world_size: int,
        *,
        forwards: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._clip = clip
        self._numel_total = sum(each.numel() for each in parameters if each.requires_grad)
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
        taken = Bucket([buffer], bucket.parameters(), bucket.gradients())
        whole = self._clip.policy == "whole_before_allreduce"
        self._held.append(taken)
        if not whole or bucket.is_last():
            held, self._held = self._held, []
            self.clip(held, ends_forward=bucket.is_last())
            if self._is_last_forward:
                works = [self._send(each.contents[0]) for each in held]
                if not whole:
                    return works[0].get_future().then(_first_value)
                for work in works:
                    work.wait()
        return _completed(buffer)

    def clip(self, buckets: Sequence[Bucket], *, ends_forward: bool) -> None:
        """Clip and divide by the ranks, in place: one bucket, or all of a forward at once.

        Of a forward that is not the update's last, the result is put aside and zeros remain; with
        the last, it is added.
        """
        whole = self._clip.policy == "whole_before_allreduce"
        for together in [buckets] if whole else [[bucket] for bucket in buckets]:
            contents = [tensor for bucket in together for tensor in bucket.contents]
            limit = self._limit_of(contents)
            norm = clip_together(contents, limit, self._world_size)
            self._norms.append(norm)
            self._clipped.append(norm > limit)
        if ends_forward:
            self._forward_norms.append(combine_norms(self._norms))
            self._norms = []
        for bucket in buckets:
            self._exchange_with_put_aside(bucket)

    def finish(self) -> ClipOutcome:
        """What was found since the last call, once the update's last backward has returned.

        `grad_norm` is this rank's own, before clipping: the root of the sum of its buckets' squared
        norms; under "each_forward" the sum of the forwards' norms. `clipped_fraction`: of all
        buckets clipped one by one, or of whole gradients. The first element of a reduced bucket
        says whether a rank poisoned it: a poisoned bucket is NaN throughout, and a sum of
        contributions each within limit / N cannot overflow.
        """
        poisoned = ~torch.isfinite(torch.stack(self._reduced)).all()
        outcome = ClipOutcome(
            grad_norm=torch.stack(self._forward_norms).sum(),
            clipped_fraction=torch.stack(self._clipped).float().mean(),
            skip=poisoned.float(),
        )
        self._start_update()
        return outcome

    def _limit_of(self, contents: Sequence[Tensor]) -> float:
        numel = sum(each.numel() for each in contents)
        limit = limit_before_allreduce(self._clip, numel, self._numel_total)
        return limit / self._limits_an_update

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
        first = bucket.contents[0]
        self._reduced.append(first[(0,) * first.dim()])

    def _send(self, buffer: Tensor) -> Work:
        work: Work = dist.all_reduce(buffer, group=self._group, async_op=True)
        return work


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
