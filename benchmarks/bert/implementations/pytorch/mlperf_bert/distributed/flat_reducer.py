"""Sends flat gradients bucket by bucket while backward runs, clipped by the config's policy.

What DistributedDataParallel does, and two things that it cannot: a bucket may be reduce-scattered,
so that each rank receives its own shard alone, and the reduced gradients need no copy: they are in
the flat buffer that the optimizer reads. Buckets are cut in the reverse order of the parameters and
never rebuilt.
"""

import contextlib
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor, nn

from mlperf_bert.config.sections import ClipSection
from mlperf_bert.distributed.clip_hook import Bucket, ClipOutcome, ClipState
from mlperf_bert.distributed.clip_policies import clips_before, gradient_norm
from mlperf_bert.distributed.clipping import outcome_after
from mlperf_bert.distributed.shard_group import ShardGroup
from mlperf_bert.distributed.wire import Wire
from mlperf_bert.optim.flat_buffers import FlatBuffers


class FlatReducer:
    """A `Clipping` (clipping.py) that also reduces.

    After `finish`, `shard_gradients` [layout.shard_numel] holds this rank's shard of the averaged
    gradient, in the wire's dtype; the outcome's factor is still to be applied. It is the buffers'
    own gradient where there is one shard and the wire's dtype is theirs.
    """

    def __init__(
        self,
        model: nn.Module,
        buffers: FlatBuffers,
        clip: ClipSection,
        group: ShardGroup,
        wire: Wire,
        world_size: int,
        forwards: int,
    ) -> None:
        self._clip = clip
        self._wire = wire
        self._group = group
        self._state = ClipState(clip, buffers.parameters, world_size, forwards=forwards, wire=wire)
        self._each_forward = clip.accumulation == "each_forward"
        self._sends = True
        self.shard_gradients = _shard_gradients(buffers, wire)
        self._buffers = buffers
        self._buckets = self._make_buckets(buffers)
        self._begin_backward()
        bucket_of = [b for b, bucket in enumerate(self._buckets) for _ in bucket.parameters]
        for number, parameter in enumerate(buffers.parameters):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._on_gradient(number, bucket_of[number])
            )
        if group.count > 1:
            self._wait_before_use(model, dict(zip(buffers.parameters, bucket_of, strict=True)))

    @contextlib.contextmanager
    def forward(self, *, is_last: bool) -> Iterator[None]:
        """Gradients add up in the flat buffer; those of the last backward are sent with it."""
        self._sends = is_last or self._each_forward
        self._state.begin_forward(is_last=is_last)
        self._begin_backward()
        yield
        if self._sends:
            self._buffers.collect()  # zeros for parameters that had no part in the update
            self._send_while(lambda bucket: True)

    def finish(self) -> ClipOutcome:
        """Wait for the gradients, and say what clipping found or is still to do."""
        self._group.wait_for_reduced()
        if clips_before(self._clip):
            return self._state.finish()
        square = gradient_norm([self.shard_gradients]).square()
        self._group.add_up(square)
        return outcome_after(self._clip, square.sqrt(), self._wire.scale)

    def _wait_before_use(self, model: nn.Module, bucket_of: dict[nn.Parameter, int]) -> None:
        """Have each module wait for its own weights alone, which the last update sent.

        A module that uses another's weights must come after it in a forward.
        """
        for module in model.modules():
            buckets = {bucket_of[each] for each in module.parameters(recurse=False)}
            if buckets:
                module.register_forward_pre_hook(self._waiting_for(buckets))

    def _waiting_for(self, buckets: set[int]) -> Callable[..., None]:
        def wait(*_: object) -> None:
            for number in buckets:
                self._group.wait_for(number)

        return wait

    def _make_buckets(self, buffers: FlatBuffers) -> list[Bucket]:
        parameters, gradients = iter(buffers.parameters), iter(buffers.gradient_views)
        return [
            Bucket(
                contents=[buffers.gradients[bucket.start : bucket.stop]],
                parameters=list(islice(parameters, len(bucket.tensors))),
                gradients=list(islice(gradients, len(bucket.tensors))),
                reduced=self.shard_gradients[buffers.layout.piece_in_shard(bucket)],
            )
            for bucket in buffers.layout.buckets
        ]

    def _begin_backward(self) -> None:
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._next = 0

    def _on_gradient(self, number: int, bucket: int) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            self._buffers.take(number)
            self._missing[bucket] -= 1
            if self._sends:
                self._send_while(lambda ready: self._missing[ready] == 0)

        return on_gradient

    def _send_while(self, is_ready: Callable[[int], bool]) -> None:
        """Send the next buckets: in the same order on every rank, whatever came first here."""
        while self._next < len(self._buckets) and is_ready(self._next):
            bucket = self._buckets[self._next]
            self._next += 1
            ends_forward = self._next == len(self._buckets)
            for ready, sent in self._state.take(bucket, ends_forward=ends_forward):
                self._group.reduce(sent, ready.reduced)


def _shard_gradients(buffers: FlatBuffers, wire: Wire) -> Tensor:
    if buffers.layout.num_shards == 1 and wire.dtype is None:
        return buffers.gradients
    return torch.zeros(
        buffers.layout.shard_numel,
        dtype=wire.dtype or buffers.gradients.dtype,
        device=buffers.gradients.device,
    )
