"""Where every parameter lies in the flat buffers, and which part of them each rank owns. No torch.

A flat buffer is a row of buckets; a bucket is a row of tensors, each padded to a multiple of BLOCK,
then itself padded so that `num_shards` equal pieces, each a multiple of BLOCK, make it up. Shard r
owns the r-th piece of every bucket: what one reduce-scatter of the bucket leaves with it. Its own
buffers hold these pieces one after the other, so the piece of a bucket that begins at `start`
begins there at start / num_shards.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024


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
        """Behind its last element, without padding."""
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """Tensors that are sent together: elements `start` to `stop` of the whole flat buffer."""

    start: int
    stop: int
    tensors: tuple[FlatTensor, ...]

    @property
    def numel(self) -> int:
        """Elements of its tensors, without padding."""
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Segment:
    """The elements `first` to `last` of a tensor (flattened), at `start` of a shard's buffers."""

    tensor: FlatTensor
    first: int
    last: int
    start: int

    @property
    def in_shard(self) -> slice:
        """Where they are in the shard's buffers."""
        return slice(self.start, self.start + self.last - self.first)

    @property
    def is_whole(self) -> bool:
        """Whether they are all of the tensor."""
        return self.last - self.first == self.tensor.numel


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The places of all tensors of a model, for a number of shards."""

    buckets: tuple[FlatBucket, ...]
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

    def piece(self, bucket: FlatBucket, shard: int) -> slice:
        """The elements of the whole buffer that shard `shard` owns of a bucket."""
        size = (bucket.stop - bucket.start) // self.num_shards
        return slice(bucket.start + shard * size, bucket.start + (shard + 1) * size)

    def piece_in_shard(self, bucket: FlatBucket) -> slice:
        """Where that piece is in the shard's own buffers: the same place in every shard."""
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
        """Of each block of a shard's buffers, its tensor's place in `tensors`.

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
        shapes: of every tensor by name.
        buckets: every name once.
        num_shards: equal parts of every bucket.
    """
    planned: list[FlatBucket] = []
    start = 0
    for names in buckets:
        tensors = []
        place = start
        for name in names:
            tensor = FlatTensor(name, tuple(shapes[name]), place)
            tensors.append(tensor)
            place = _round_up(tensor.stop, BLOCK)
        stop = start + _round_up(place - start, BLOCK * num_shards)
        planned.append(FlatBucket(start, stop, tuple(tensors)))
        start = stop
    return FlatLayout(tuple(planned), num_shards)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
