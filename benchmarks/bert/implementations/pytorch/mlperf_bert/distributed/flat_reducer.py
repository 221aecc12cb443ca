"""Flat buffers of weights and gradients, which are sent bucket by bucket during the backward pass.

This module replaces DistributedDataParallel, and adds two features. It can reduce-scatter a bucket,
so that each rank receives only its own shard. It also does not need to copy the reduced gradients,
because they arrive in the flat buffer that the optimizer reads. The buckets contain the parameters
in reverse order, are clipped by the config's policy, and are never rebuilt.

The setting `parallel.data_parallel` divides the optimizer state among the N ranks. With `flat`,
each rank owns the whole state. With `zero1_node`, each rank of a node owns one shard of the state,
and every node has all shards. With `zero1`, each rank owns one of N shards.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Work

from mlperf_bert.config.sections import ClipSection, DataParallel
from mlperf_bert.distributed.bucket_plan import FlatLayout
from mlperf_bert.distributed.clipping import (
    BucketGradients,
    ClipOutcome,
    ClipState,
    clips_before,
    gradient_norm,
    outcome_after,
)
from mlperf_bert.distributed.launch import RankInfo

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values


class FlatBuffers:
    """A model's weights and its gradients, each in one flat buffer [layout.numel].

    The buffer of gradients has the dtype of `weights`. The parameters are views of `weights`. A
    backward pass leaves its gradients in the tensors that autograd allocated, and `take` or
    `collect` then moves them into `gradients`. With one backward pass per update, copying them
    moves fewer bytes than zeroing the buffer and adding them to it.
    """

    def __init__(self, model: nn.Module, layout: FlatLayout, weights: Tensor) -> None:
        self.layout = layout
        self.parameters = _trained(model, layout)
        self.weights = weights
        self.gradients = torch.zeros_like(weights)
        self.gradient_views = views(self.gradients, layout)
        for parameter, view in zip(self.parameters, views(weights, layout), strict=True):
            parameter.data = view
        # The padding stays zero unless a bucket is multiplied by NaN because of a non-finite norm.
        self._gaps = [self.gradients[gap] for gap in layout.gaps]
        self.begin_update()

    def begin_update(self) -> None:
        """Discard all gradients of the previous update."""
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        for parameter in self.parameters:
            parameter.grad = None
        self._awaited = set(range(len(self.parameters)))

    def take(self, number: int) -> None:
        """Move the gradient of one parameter into `gradients`.

        If `gradients` contains a gradient of an earlier micro-batch of this update, the new
        gradient is added to that gradient. `number` is the parameter's index in `layout.tensors`.
        """
        parameter, own = self.parameters[number], self.gradient_views[number]
        if parameter.grad is None:
            return
        if number in self._awaited:
            self._awaited.remove(number)
            own.copy_(parameter.grad)
        else:
            own.add_(parameter.grad)
        parameter.grad = None

    def collect(self) -> None:
        """Copy the gradients that `take` has not moved, and write zeros for missing gradients."""
        found = [number for number in self._awaited if self.parameters[number].grad is not None]
        for number in self._awaited.difference(found):
            self.gradient_views[number].zero_()
        if found:
            gradients = [self.parameters[number].grad for number in found]
            torch._foreach_copy_(
                [self.gradient_views[number] for number in found],
                [gradient for gradient in gradients if gradient is not None],
            )
        self._awaited.clear()


def flat_weights(model: nn.Module, layout: FlatLayout) -> Tensor:
    """Return a new flat buffer [layout.numel] with a model's weights, and with zeros as padding."""
    parameters = _trained(model, layout)
    first = parameters[0]
    flat = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
    for view, parameter in zip(views(flat, layout), parameters, strict=True):
        view.copy_(parameter.detach())
    return flat


def views(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """Return one view of the whole flat buffer per tensor, in the tensor's own shape.

    The views are in the order of `layout.tensors`.
    """
    return [flat[each.start : each.stop].view(each.shape) for each in layout.tensors]


def _trained(model: nn.Module, layout: FlatLayout) -> list[nn.Parameter]:
    """Return the model's trained parameters, in the order of the layout."""
    named = dict(model.named_parameters())
    return [named[tensor.name] for tensor in layout.tensors]


def num_shards(data_parallel: DataParallel, info: RankInfo) -> int:
    """Return the number of shards into which the optimizer state is split."""
    parts = {"zero1_node": info.local_world_size, "zero1": info.world_size}
    return parts.get(data_parallel, 1)


class ShardGroup:
    """The communication of a rank with the ranks that own other shards, and with its replicas.

    Replicas are ranks that own the same shard. Consecutive ranks own consecutive shards. Each
    transfer has a method that starts it and another one that waits for it, so that the transfer
    overlaps with other work. All ranks must create the group.

    Args:
        count: the number of shards, which divides the number of ranks.
    """

    def __init__(self, info: RankInfo, count: int, device: torch.device) -> None:
        self.count = count
        self.index = info.rank % count
        ranks = range(info.world_size)
        self._shards = _group_of(info.rank, [ranks[i : i + count] for i in ranks[::count]])
        self._replicas = _group_of(info.rank, [ranks[i::count] for i in range(count)])
        # On a GPU, the sum over replicas follows the sum over shards on a separate stream.
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._reducing: list[Work] = []
        self._for_replicas: list[Tensor] = []
        self._gathering: dict[int, Work] = {}

    def reduce(self, whole: Tensor, piece: Tensor) -> None:
        """Start summing `whole` over all ranks. `piece` receives this rank's shard of the sum.

        If there is only one shard, `whole` and `piece` share the same memory.
        """
        if self._stream is None:
            self._begin(whole, piece)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._begin(whole, piece)
        whole.record_stream(self._stream)

    def wait_for_reduced(self) -> None:
        """Wait for the results of all calls of `reduce`.

        On a GPU, the current stream waits instead of the host.
        """
        _wait_for(self._reducing)
        self._reducing += [_all_reduce(piece, self._replicas) for piece in self._for_replicas]
        self._for_replicas.clear()
        _wait_for(self._reducing)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def add_up(self, tensor: Tensor) -> None:
        """Sum `tensor` over the shards in place, so that all replicas get the same result.

        Nodes may add in different orders. Replicas take the mean, so that their weights stay equal.
        """
        if self._shards is not None:
            dist.all_reduce(tensor, group=self._shards)
            if self._replicas is not None:
                dist.all_reduce(tensor, group=self._replicas)
                tensor.div_(dist.get_world_size(self._replicas))

    def exchange(
        self, sent: Tensor, sent_to: Sequence[int], received_from: Sequence[int]
    ) -> tuple[Tensor, Callable[[], object]]:
        """Start an all-to-all exchange of the rows of `sent` [rows, n] between the shards.

        Shard i receives `sent_to[i]` rows. Returns a buffer, which receives `received_from[i]` rows
        from shard i, and a function that waits for these rows. On a GPU, the current stream waits
        instead of the host.
        """
        if self._shards is None:
            return sent, lambda: None
        received = sent.new_empty((sum(received_from), sent.size(1)))
        sizes = list(received_from), list(sent_to)
        work = dist.all_to_all_single(received, sent, *sizes, group=self._shards, async_op=True)
        assert work is not None  # because this rank belongs to the group
        return received, work.wait

    def publish(self, number: int, whole: Tensor, piece: Tensor) -> None:
        """Start an all-gather that copies every shard's `piece` of bucket `number` into `whole`."""
        if self._shards is not None:
            all_gather = renamed("all_gather_into_tensor", "all_gather_single")
            work: Work = all_gather(whole, piece, group=self._shards, async_op=True)
            self._gathering[number] = work

    def wait_for(self, number: int) -> None:
        """Wait for the all-gather of bucket `number`, if one was started.

        On a GPU, the current stream waits instead of the host.
        """
        work = self._gathering.pop(number, None)
        if work is not None:
            work.wait()

    def wait(self) -> None:
        """Wait for the all-gathers of all buckets.

        On a GPU, the current stream waits instead of the host.
        """
        for number in list(self._gathering):
            self.wait_for(number)

    def _begin(self, whole: Tensor, piece: Tensor) -> None:
        if self._shards is None:
            if self._replicas is not None:
                self._reducing.append(_all_reduce(piece, self._replicas))
            return
        reduce_scatter = renamed("reduce_scatter_tensor", "reduce_scatter_single")
        work: Work = reduce_scatter(piece, whole, group=self._shards, async_op=True)
        if self._stream is None or self._replicas is None:
            self._reducing.append(work)
            # gloo would block the host here, so sums over replicas start after the backward pass.
            self._for_replicas += [piece] * (self._replicas is not None)
            return
        work.wait()  # blocks only this stream
        self._reducing.append(_all_reduce(piece, self._replicas))


def _group_of(rank: int, groups: Sequence[range]) -> Any:
    """Create the process groups for all `groups`, and return the one that contains `rank`.

    Returns None if each group has only one rank.
    """
    if len(groups[0]) == 1:
        return None
    if len(groups) == 1:
        return dist.group.WORLD
    made = [dist.new_group(list(ranks)) for ranks in groups]  # on all ranks, as torch requires
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


def renamed(old: str, new: str) -> Callable[..., Any]:
    """Return the collective of torch.distributed that torch 2.13 renamed from `old` to `new`."""
    found: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return found


def _all_reduce(tensor: Tensor, group: Any) -> Work:
    work: Work = dist.all_reduce(tensor, group=group, async_op=True)
    return work


def _wait_for(works: list[Work]) -> None:
    for work in works:
        work.wait()
    works.clear()


class ArrivingParameters(dict[str, nn.Parameter | None]):
    """A dictionary of a module's own parameters in which a read waits for the new weights.

    If each rank updates only its shard of the weights, a rank is still receiving the other shards
    when an update ends. torch looks up a module's attribute (`dense.weight`) in this dictionary,
    and lists parameters from it. A forward pass therefore cannot read weights that have not
    arrived. This is true if the pass calls the module, and also if it reads the module's parameters
    directly, as fused blocks, FP8 products and tied heads do. DeepSpeed gathers the weights of ZeRO
    stage 3 in the same way.

    On a GPU, only the stream that reads a bucket first waits for that bucket. All readers must
    therefore use that stream, or first call `FlatOptimizer.wait_for_weights`.

    Args:
        parameters: the module's parameters.
        wait_for: a function that waits for a parameter's weights. On a GPU, the stream waits.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter | None],
        wait_for: Callable[[nn.Parameter], None],
    ) -> None:
        super().__init__(parameters)
        self._wait_for = wait_for

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._wait_for(parameter)
        return parameter

    def items(self) -> "dict_items[str, nn.Parameter | None]":
        """Return all names and parameters, after waiting for all of their weights."""
        self._wait_for_all()
        return super().items()

    def values(self) -> "dict_values[str, nn.Parameter | None]":
        """Return all parameters, after waiting for all of their weights."""
        self._wait_for_all()
        return super().values()

    def _wait_for_all(self) -> None:
        for name in self:
            self[name]


class FlatReducer:
    """A `Clipping` that also averages the gradients over the ranks.

    After `finish`, `shard_gradients` [layout.shard_numel] contains this rank's shard of the
    averaged gradient. The caller must still multiply this shard by the outcome's `gradient_factor`.
    The shard's dtype is `wire`, or that of the buffers if `wire` is None. With one shard and no
    `wire`, the shard is the tensor `buffers.gradients` itself.
    """

    def __init__(
        self,
        model: nn.Module,
        buffers: FlatBuffers,
        clip: ClipSection,
        group: ShardGroup,
        wire: torch.dtype | None,
        world_size: int,
    ) -> None:
        self._clip = clip
        self._group = group
        self._state = ClipState(clip, buffers.parameters, world_size, wire=wire)
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
        """Return a context manager in which backward passes accumulate gradients.

        The flat buffer contains their sum. The last backward pass of an update sends this sum.
        """
        self._sends = is_last
        self._begin_backward()
        yield
        if is_last:
            self._buffers.collect()  # also fills in zeros for parameters without a gradient
            self._send_while(lambda bucket: True)

    def finish(self) -> ClipOutcome:
        """Wait for the averaged gradients, and return the outcome of clipping them."""
        self._group.wait_for_reduced()
        if clips_before(self._clip):
            return self._state.finish()
        square = gradient_norm([self.shard_gradients]).square()
        self._group.add_up(square)
        return outcome_after(self._clip, square.sqrt())

    def _wait_before_use(self, model: nn.Module, bucket_of: dict[nn.Parameter, int]) -> None:
        """Make every read of a parameter wait until the parameter's new weights have arrived.

        The previous update has published these weights. A read does not wait for the weights of
        other buckets.
        """

        def wait_for(parameter: nn.Parameter) -> None:
            number = bucket_of.get(parameter)
            if number is not None:  # a parameter that is not trained is never sent
                self._group.wait_for(number)

        for module in model.modules():
            module._parameters = ArrivingParameters(module._parameters, wait_for)

    def _make_buckets(self, buffers: FlatBuffers) -> list[BucketGradients]:
        parameters = iter(buffers.parameters)
        return [
            BucketGradients(
                contents=[buffers.gradients[bucket.start : bucket.stop]],
                parameters=list(islice(parameters, len(bucket.tensors))),
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
        """Send buckets in the same order on every rank, up to the first one that is not ready."""
        while self._next < len(self._buckets) and is_ready(self._next):
            bucket = self._buckets[self._next]
            self._next += 1
            ends_backward = self._next == len(self._buckets)
            for ready, sent in self._state.take(bucket, ends_backward=ends_backward):
                self._group.reduce(sent, ready.reduced)


def _shard_gradients(buffers: FlatBuffers, wire: torch.dtype | None) -> Tensor:
    if buffers.layout.num_shards == 1 and wire is None:
        return buffers.gradients
    return torch.zeros(
        buffers.layout.shard_numel,
        dtype=wire or buffers.gradients.dtype,
        device=buffers.gradients.device,
    )
