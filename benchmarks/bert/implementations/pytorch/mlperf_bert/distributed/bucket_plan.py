"""Plans of the gradient buckets, and of the position of each tensor in the flat buffers.

This module does not import torch.

A bucket is a group of gradients that are sent together. DistributedDataParallel (DDP, arXiv
2006.15704) uses a single bucket in its first step and then rebuilds its buckets. It adds parameters
to a bucket, in the order in which their gradients became ready, until the bucket reaches its size
limit, the cap. DDP never splits a gradient, and it sends a bucket when the bucket's last gradient
is ready.

A flat buffer is a sequence of buckets, and a bucket is a sequence of tensors, each padded to a
multiple of BLOCK elements. The bucket is padded too, so that it splits into `num_shards` equal
pieces whose sizes are multiples of BLOCK. Shard r owns the r-th piece of every bucket, which a
reduce-scatter of the bucket sends to this shard. A shard's own buffers contain its pieces of all
buckets, in the same order. If a bucket begins at `start` in the whole buffer, the shard's piece of
that bucket therefore begins at start / num_shards in the shard's buffers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIB = 2**20
# Default caps of DDP, for all buckets and for the first one.
DEFAULT_CAP_MB = 25.0
SMALL_FIRST_CAP_MB = 1.0
BLOCK = 1024  # tensors in flat buffers are padded to a multiple of this number of elements


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyGradient:
    """A parameter, and the time at which the backward pass completes the parameter's gradient.

    `ready_at` is this time as a fraction of the backward pass, from 0 to 1.
    """

    name: str
    numel: int
    ready_at: float


def plan_buckets(
    gradients: Iterable[ReadyGradient], element_bytes: int, cap_mb: float
) -> list[list[ReadyGradient]]:
    """Return the buckets that DistributedDataParallel (DDP) uses after its first step.

    The buckets are in the order in which DDP sends them.

    Args:
        gradients: the gradients of all parameters, all of one dtype, in the order in which they
            become ready.
        element_bytes: the size of an element of that dtype, in bytes.
        cap_mb: `parallel.bucket_cap_mb`, in MiB. A bucket is closed as soon as it reaches the cap,
            so it may be larger. If the cap is DDP's default, the cap of the first bucket is
            smaller.
    """
    is_default = ddp_bucket_cap_mb(cap_mb) is None
    limit = _cap_bytes(SMALL_FIRST_CAP_MB if is_default else cap_mb)
    buckets: list[list[ReadyGradient]] = []
    waiting: list[ReadyGradient] = []
    for gradient in gradients:
        waiting.append(gradient)
        if element_bytes * sum(each.numel for each in waiting) >= limit:
            buckets.append(waiting)
            waiting, limit = [], _cap_bytes(cap_mb)
    return [*buckets, waiting] if waiting else buckets


def plan_in_reverse(
    numel_by_name: Mapping[str, int], element_bytes: int, cap_mb: float
) -> list[list[str]]:
    """Plan buckets as `plan_buckets` does, and return them as lists of parameter names.

    The function assumes that gradients become ready in the reverse order of the parameters.
    """
    ready = [
        ReadyGradient(name=name, numel=numel_by_name[name], ready_at=1.0)
        for name in reversed(list(numel_by_name))
    ]
    buckets = plan_buckets(ready, element_bytes, cap_mb)
    return [[gradient.name for gradient in bucket] for bucket in buckets]


def ddp_bucket_cap_mb(cap_mb: float) -> float | None:
    """Return DistributedDataParallel's argument `bucket_cap_mb`, or None for its default cap.

    With None, the first bucket is closed at 1 MiB, so that communication starts early. An explicit
    cap also applies to the first bucket, even if this cap equals the default of 25 MiB.
    """
    return None if cap_mb == DEFAULT_CAP_MB else cap_mb


def _cap_bytes(cap_mb: float) -> int:
    return int(cap_mb * MIB)


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A parameter in the whole flat buffer, where its first element is at index `start`."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """The number of the parameter's elements, without padding."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """The index after the parameter's last element in the whole buffer, before any padding."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent together, at indices `start` to `stop` - 1 of the whole flat buffer."""

    start: int
    stop: int
    tensors: tuple[FlatTensor, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a tensor that one shard owns.

    It consists of the elements `first` to `last` - 1 of the flattened tensor. In the shard's
    buffers, these elements begin at index `start`.
    """

    tensor: FlatTensor
    first: int
    last: int
    start: int

    @property
    def in_shard(self) -> slice:
        """The range of the segment's elements in the shard's buffers."""
        return slice(self.start, self.start + self.last - self.first)

    @property
    def is_whole(self) -> bool:
        """True if the segment contains all elements of its tensor."""
        return self.last - self.first == self.tensor.numel


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The positions of a model's tensors in flat buffers, which consist of `num_shards` shards."""

    buckets: tuple[Bucket, ...]
    num_shards: int

    @property
    def numel(self) -> int:
        """The number of elements of a whole flat buffer, including padding."""
        return self.buckets[-1].stop

    @property
    def shard_numel(self) -> int:
        """The number of elements of one shard's buffer, including padding."""
        return self.numel // self.num_shards

    @property
    def tensors(self) -> tuple[FlatTensor, ...]:
        """All tensors, in their order in the flat buffer."""
        return tuple(tensor for bucket in self.buckets for tensor in bucket.tensors)

    @property
    def gaps(self) -> tuple[slice, ...]:
        """The ranges of the whole flat buffer that contain only padding."""
        starts = [*(tensor.start for tensor in self.tensors), self.numel]
        pairs = zip(self.tensors, starts[1:], strict=True)
        return tuple(slice(each.stop, after) for each, after in pairs if each.stop < after)

    def piece(self, bucket: Bucket, shard: int) -> slice:
        """Return the range of the whole flat buffer that contains a shard's piece of a bucket."""
        size = (bucket.stop - bucket.start) // self.num_shards
        return slice(bucket.start + shard * size, bucket.start + (shard + 1) * size)

    def piece_in_shard(self, bucket: Bucket) -> slice:
        """Return the range of any shard's own buffers that contains its piece of a bucket."""
        return slice(bucket.start // self.num_shards, bucket.stop // self.num_shards)

    def segments(self, shard: int) -> Iterator[Segment]:
        """Yield the parts of tensors that a shard owns, in the order of the shard's buffers.

        A shard owns at most one part of each tensor.
        """
        for bucket in self.buckets:
            piece, offset = self.piece(bucket, shard), self.piece_in_shard(bucket).start
            for tensor in bucket.tensors:
                first, last = max(tensor.start, piece.start), min(tensor.stop, piece.stop)
                if first < last:
                    yield Segment(
                        tensor,
                        first - tensor.start,
                        last - tensor.start,
                        offset + first - piece.start,
                    )

    def tensor_of_block(self, shard: int) -> NDArray[np.int32]:
        """Return the number of the tensor in each block of a shard's buffers, int32 [blocks].

        A tensor's number is its index in `tensors`. Blocks of padding at the end of a bucket belong
        to the bucket's last tensor.
        """
        starts = [tensor.start for tensor in self.tensors]
        owned = [
            np.arange(piece.start, piece.stop, BLOCK)
            for piece in (self.piece(bucket, shard) for bucket in self.buckets)
        ]
        found = np.searchsorted(starts, np.concatenate(owned), side="right") - 1
        return found.astype(np.int32)


def plan_layout(
    shapes: Mapping[str, tuple[int, ...]], buckets: Iterable[Sequence[str]], num_shards: int
) -> FlatLayout:
    """Assign a position in the flat buffers to every tensor of the given buckets.

    Args:
        shapes: the shape of every tensor, by name.
        buckets: the names of the tensors of each bucket, in the order in which buckets are sent.
            Every name occurs once.
        num_shards: the number of equal pieces of every bucket.
    """
    planned: list[Bucket] = []
    start = 0
    for names in buckets:
        tensors = []
        end = start
        for name in names:
            tensor = FlatTensor(name, tuple(shapes[name]), end)
            tensors.append(tensor)
            end = _round_up(tensor.stop, BLOCK)
        stop = start + _round_up(end - start, BLOCK * num_shards)
        planned.append(Bucket(start, stop, tuple(tensors)))
        start = stop
    return FlatLayout(tuple(planned), num_shards)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
