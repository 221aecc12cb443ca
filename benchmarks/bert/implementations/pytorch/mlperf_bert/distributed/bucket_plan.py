"""Plan of gradient buckets, and each tensor's place in the flat buffers; no torch.

DistributedDataParallel (arXiv 2006.15704) runs its first step with one bucket and then rebuilds:
parameters in the order in which their gradients became ready are put into a bucket until it holds
the cap or more. A gradient is never split, and a bucket is sent when its last gradient is ready.

A flat buffer is a row of buckets; a bucket is a row of tensors, each padded to a multiple of BLOCK.
The bucket is padded too, so that it splits into `num_shards` equal pieces, each a multiple of
BLOCK. Shard r owns the r-th piece of every bucket, the one that a reduce-scatter of the bucket
gives it. Its own buffers hold these pieces one after the other, so the piece of a bucket at `start`
begins there at start / num_shards.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIB = 2**20
# torch.nn.parallel.DistributedDataParallel's default cap, and its first bucket's cap.
DEFAULT_CAP_MB = 25.0
SMALL_FIRST_CAP_MB = 1.0
BLOCK = 1024  # elements: tensors in flat buffers are padded to multiples of it


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyGradient:
    """A parameter, and when its gradient is complete, as a share of backward from 0 to 1."""

    name: str
    numel: int
    ready_at: float


def plan_buckets(
    gradients: Iterable[ReadyGradient], element_bytes: int, cap_mb: float
) -> list[list[ReadyGradient]]:
    """The buckets after DDP's rebuild, in the order in which they are sent.

    Args:
        gradients: those of all parameters, of one dtype, in the order in which they become ready.
        element_bytes: size of that dtype.
        cap_mb: `parallel.bucket_cap_mb`, in MiB. A bucket is closed as soon as it reaches the cap,
            so it may be larger. With DDP's default the first bucket's cap is smaller.
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
    """Names of the buckets from `plan_buckets`, given only the order of the parameters.

    Gradients are assumed to become ready in the reverse order.
    """
    ready = [
        ReadyGradient(name=name, numel=numel_by_name[name], ready_at=1.0)
        for name in reversed(list(numel_by_name))
    ]
    buckets = plan_buckets(ready, element_bytes, cap_mb)
    return [[gradient.name for gradient in bucket] for bucket in buckets]


def ddp_bucket_cap_mb(cap_mb: float) -> float | None:
    """The value of DDP's `bucket_cap_mb`: None for its default.

    Only with None does DDP close the first bucket at 1 MiB, so that communication starts early; an
    explicit cap holds for the first bucket too, even one of 25 MiB.
    """
    return None if cap_mb == DEFAULT_CAP_MB else cap_mb


def _cap_bytes(cap_mb: float) -> int:
    return int(cap_mb * MIB)


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """One parameter; `start` is its first element's place in the whole flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """End of its elements, without padding."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent together: elements `start` to `stop` of the whole flat buffer."""

    start: int
    stop: int
    tensors: tuple[FlatTensor, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """The elements `first` to `last` of a tensor (flattened), at `start` of a shard's buffers."""

    tensor: FlatTensor
    first: int
    last: int
    start: int

    @property
    def in_shard(self) -> slice:
        """The elements' place in the shard's buffers."""
        return slice(self.start, self.start + self.last - self.first)

    @property
    def is_whole(self) -> bool:
        """True if the segment is the whole tensor."""
        return self.last - self.first == self.tensor.numel


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The places of all tensors of a model, for a number of shards."""

    buckets: tuple[Bucket, ...]
    num_shards: int

    @property
    def numel(self) -> int:
        """Elements of a whole flat buffer, padding included."""
        return self.buckets[-1].stop

    @property
    def shard_numel(self) -> int:
        """Elements of one shard's buffers, padding included."""
        return self.numel // self.num_shards

    @property
    def tensors(self) -> tuple[FlatTensor, ...]:
        """All tensors in the order of the buffer."""
        return tuple(tensor for bucket in self.buckets for tensor in bucket.tensors)

    @property
    def gaps(self) -> tuple[slice, ...]:
        """The padding of a whole buffer."""
        starts = [*(tensor.start for tensor in self.tensors), self.numel]
        pairs = zip(self.tensors, starts[1:], strict=True)
        return tuple(slice(each.stop, after) for each, after in pairs if each.stop < after)

    def piece(self, bucket: Bucket, shard: int) -> slice:
        """The elements of the whole buffer that shard `shard` owns of a bucket."""
        size = (bucket.stop - bucket.start) // self.num_shards
        return slice(bucket.start + shard * size, bucket.start + (shard + 1) * size)

    def piece_in_shard(self, bucket: Bucket) -> slice:
        """The place of that piece in the shard's own buffers, the same in every shard."""
        return slice(bucket.start // self.num_shards, bucket.stop // self.num_shards)

    def segments(self, shard: int) -> Iterator[Segment]:
        """The parts of tensors that a shard owns, in its buffers' order; at most one a tensor."""
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
        """The index in `tensors` of the tensor of each block of a shard's buffers.

        Blocks of a bucket's own padding count to the bucket's last tensor.
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
    """The layout of tensors in the given buckets (names, in the order of sending).

    Args:
        shapes: shape of every tensor by name.
        buckets: names of each bucket, every name once.
        num_shards: number of equal parts of every bucket.
    """
    planned: list[Bucket] = []
    start = 0
    for names in buckets:
        tensors = []
        place = start
        for name in names:
            tensor = FlatTensor(name, tuple(shapes[name]), place)
            tensors.append(tensor)
            place = _round_up(tensor.stop, BLOCK)
        stop = start + _round_up(place - start, BLOCK * num_shards)
        planned.append(Bucket(start, stop, tuple(tensors)))
        start = stop
    return FlatLayout(tuple(planned), num_shards)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
