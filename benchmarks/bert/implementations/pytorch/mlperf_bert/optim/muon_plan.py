"""Muon's matrices: which parameters they are, what each costs, and the way of its blocks; no torch.

Newton-Schulz needs a whole matrix, but a shard holds pieces of many. So each matrix has an owner
among the shards. Its blocks go there, and come back orthogonalised.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.distributed.bucket_plan import BLOCK, FlatLayout, FlatTensor
from mlperf_bert.errors import ConfigError

NEWTON_SCHULZ_STEPS = 5
STACK_ELEMENTS = 2**25  # of matrices multiplied together: 64 MiB in bfloat16

# Ends of the names of parameters that hold several matrices, one below the other.
_JOINED = MappingProxyType({"attn.Wqkv.weight": 3, "mlp.Wi.weight": 2})

Shape = tuple[int, ...]
Blocks = NDArray[np.int64]


def is_hidden_matrix(name: str, shape: Shape) -> bool:
    """True if Muon orthogonalises this parameter: weight matrices of an encoder layer."""
    return (".layer." in name or ".layers." in name) and len(shape) == 2


def num_matrices(name: str) -> int:
    """The number of equal matrices that a parameter holds, each orthogonalised for itself.

    They are ModernBERT's of queries, keys and values, and of the halves of a gated product.
    """
    return next((count for end, count in _JOINED.items() if name.endswith(end)), 1)


def split_matrices(layout: FlatLayout) -> FlatLayout:
    """The same buffers, with every matrix of a parameter as a tensor of its own.

    Raises ConfigError if a matrix does not begin with a block.
    """
    buckets = [
        replace(bucket, tensors=tuple(part for each in bucket.tensors for part in _matrices(each)))
        for bucket in layout.buckets
    ]
    return replace(layout, buckets=tuple(buckets))


def _matrices(tensor: FlatTensor) -> list[FlatTensor]:
    count = num_matrices(tensor.name) if is_hidden_matrix(tensor.name, tensor.shape) else 1
    if count == 1:
        return [tensor]
    numel = tensor.numel // count
    if numel % BLOCK:
        problem = f"makes {tensor.name} of {count} matrices with {numel:,} elements each"
        remedy = f"Muon needs multiples of {BLOCK:,}: make it and intermediate_size multiples of 32"
        raise ConfigError("model.hidden_size", problem, remedy)
    shape = (tensor.shape[0] // count, *tensor.shape[1:])
    return [
        FlatTensor(f"{tensor.name}.{part}", shape, tensor.start + part * numel)
        for part in range(count)
    ]


def update_scale(name: str, shape: Shape) -> float:
    """The factor that gives an orthogonalised update the root mean square of AdamW's.

    It is 0 for a parameter that is not orthogonalised, and goes by the shape of each matrix.

    Source: Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982), section 2.2.
    """
    if not is_hidden_matrix(name, shape):
        return 0.0
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows // num_matrices(name), columns))


def newton_schulz_flops(shape: Shape) -> int:
    """Floating-point operations of one matrix's Newton-Schulz steps."""
    small, large = sorted(shape)
    return NEWTON_SCHULZ_STEPS * (4 * small * small * large + 2 * small**3)


def deal_matrices(shapes: Sequence[Shape], count: int) -> list[int]:
    """The owner of each matrix among `count` shards: the most expensive first, to who has least."""
    costs, owners = [0] * count, [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda each: -newton_schulz_flops(shapes[each])):
        owners[number] = costs.index(min(costs))
        costs[owners[number]] += newton_schulz_flops(shapes[number])
    return owners


@dataclass(frozen=True, slots=True)
class Stack:
    """`count` matrices of one shape, from block `start` of an owner's blocks."""

    start: int
    count: int
    shape: Shape

    @property
    def blocks_each(self) -> int:
        """Blocks of one matrix."""
        return -(-math.prod(self.shape) // BLOCK)

    @property
    def stop(self) -> int:
        """The block after the last."""
        return self.start + self.count * self.blocks_each


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one shard's blocks to the owners and back.

    The shard's blocks `sent` go out, `sent_to` many to each shard; `received_from` many come in
    from each. Block `order[i]` of those is block i of the stacks.
    """

    sent: Blocks
    sent_to: tuple[int, ...]
    received_from: tuple[int, ...]
    order: Blocks
    stacks: tuple[Stack, ...]


def plan_route(layout: FlatLayout, shard: int) -> Route:
    """The route of `shard` in a layout; with one shard, the order of the stacks alone.

    The layout is one of `split_matrices`.
    """
    shapes = {
        tensor.name: tensor.shape
        for tensor in layout.tensors
        if is_hidden_matrix(tensor.name, tensor.shape)
    }
    owners = dict(zip(shapes, deal_matrices(list(shapes.values()), layout.num_shards), strict=True))
    # Matrices of one shape stand together.
    names = sorted(shapes, key=lambda name: (owners[name], shapes[name], name))
    held = [_blocks_held(layout, each) for each in range(layout.num_shards)]
    mine = [name for name in names if owners[name] == shard]
    to_owner = [
        np.concatenate([_NONE, *(held[shard][name] for name in names if owners[name] == owner)])
        for owner in range(layout.num_shards)
    ]
    from_shards = [[len(held[source][name]) for name in mine] for source in range(len(held))]
    matrices = np.concatenate([_NONE, *(np.repeat(np.arange(len(mine)), n) for n in from_shards)])
    return Route(
        sent=np.concatenate(to_owner),
        sent_to=tuple(map(len, to_owner)),
        received_from=tuple(map(sum, from_shards)),
        order=np.argsort(matrices, kind="stable"),  # a matrix's pieces come in the shards' order
        stacks=tuple(_stacks([shapes[name] for name in mine])),
    )


_NONE: Blocks = np.zeros(0, dtype=np.int64)


def _blocks_held(layout: FlatLayout, shard: int) -> Mapping[str, Blocks]:
    """Places of each tensor's blocks in a shard's buffers."""
    held = {tensor.name: _NONE for tensor in layout.tensors}
    for segment in layout.segments(shard):
        blocks = -(-(segment.last - segment.first) // BLOCK)
        held[segment.tensor.name] = segment.start // BLOCK + np.arange(blocks)
    return held


def _stacks(shapes: Sequence[Shape]) -> Iterable[Stack]:
    start = 0
    for shape in dict.fromkeys(shapes):
        most = max(1, STACK_ELEMENTS // math.prod(shape))
        left = shapes.count(shape)
        while left:
            stack = Stack(start, min(left, most), shape)
            yield stack
            start, left = stack.stop, left - stack.count
