"""Plan which parameters Muon orthogonalizes and which shard handles each, without using torch.

The Newton-Schulz iteration needs a whole matrix, but a shard may contain only a part of a matrix.
Each matrix therefore has an owner, which is one of the shards. The other shards send their blocks
of the matrix to the owner, which orthogonalizes them and sends them back.
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
STACK_ELEMENTS = 2**25  # largest size of matrices in one batched product, 64 MiB in bfloat16

# Suffixes of the names of parameters that consist of several matrices stacked by rows.
_JOINED = MappingProxyType({"attn.Wqkv.weight": 3, "mlp.Wi.weight": 2})

Shape = tuple[int, ...]
Blocks = NDArray[np.int64]


def is_hidden_matrix(name: str, shape: Shape) -> bool:
    """Return True if Muon orthogonalizes a parameter.

    Muon orthogonalizes the weight matrices of the encoder's layers.
    """
    return (".layer." in name or ".layers." in name) and len(shape) == 2


def num_matrices(name: str) -> int:
    """Return the number of matrices of equal shape that a parameter contains.

    Muon orthogonalizes each of them separately. In ModernBERT, one parameter contains the matrices
    of queries, keys and values, and another one contains the two halves of a gated product.
    """
    return next((count for end, count in _JOINED.items() if name.endswith(end)), 1)


def split_matrices(layout: FlatLayout) -> FlatLayout:
    """Return the layout in which each matrix of a parameter is a separate tensor.

    Raises ConfigError if a matrix does not start at a multiple of BLOCK.
    """
    buckets = [
        replace(bucket, tensors=tuple(part for each in bucket.tensors for part in _split(each)))
        for bucket in layout.buckets
    ]
    return replace(layout, buckets=tuple(buckets))


def _split(tensor: FlatTensor) -> list[FlatTensor]:
    count = num_matrices(tensor.name) if is_hidden_matrix(tensor.name, tensor.shape) else 1
    if count == 1:
        return [tensor]
    numel = tensor.numel // count
    if numel % BLOCK:
        problem = f"each of the {count} matrices of {tensor.name} has {numel:,} elements"
        problem += f", but Muon needs a multiple of {BLOCK:,}"
        remedy = "set model.hidden_size and model.intermediate_size to multiples of 32"
        raise ConfigError("model.hidden_size", problem, remedy)
    shape = (tensor.shape[0] // count, *tensor.shape[1:])
    return [
        FlatTensor(f"{tensor.name}.{part}", shape, tensor.start + part * numel)
        for part in range(count)
    ]


def update_scale(name: str, shape: Shape) -> float:
    """Return the factor that scales an orthogonalized update to AdamW's root mean square.

    The factor depends on the shape of the matrix. The factor is 0 for a parameter that Muon does
    not orthogonalize.

    Source: Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982), section 2.2.
    """
    if not is_hidden_matrix(name, shape):
        return 0.0
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows // num_matrices(name), columns))


def newton_schulz_flops(shape: Shape) -> int:
    """Return the number of floating-point operations of Newton-Schulz for a matrix."""
    small, large = sorted(shape)
    return NEWTON_SCHULZ_STEPS * (4 * small * small * large + 2 * small**3)


def assign_matrices(shapes: Sequence[Shape], count: int) -> list[int]:
    """Assign each matrix to one of `count` shards, and return the shard of each matrix.

    Matrices are assigned in descending order of their cost. Each one is assigned to the shard with
    the smallest load so far.
    """
    costs, owners = [0] * count, [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda i: -newton_schulz_flops(shapes[i])):
        owners[number] = costs.index(min(costs))
        costs[owners[number]] += newton_schulz_flops(shapes[number])
    return owners


@dataclass(frozen=True, slots=True)
class Stack:
    """`count` matrices of the same shape, which start at block `start` of their owner's blocks."""

    start: int
    count: int
    shape: Shape

    @property
    def blocks_each(self) -> int:
        """Number of blocks of each matrix."""
        return -(-math.prod(self.shape) // BLOCK)

    @property
    def stop(self) -> int:
        """Number of the first block after the stack."""
        return self.start + self.count * self.blocks_each


@dataclass(frozen=True, slots=True)
class Route:
    """The blocks that a shard sends to the owners of matrices, and that it receives as an owner.

    The shard sends its blocks `sent`, of which `sent_to[i]` go to shard i, and receives
    `received_from[i]` blocks from shard i. Block j of `stacks` is block `order[j]` of the received
    blocks. After they are orthogonalized, all blocks return to the shards that sent them.
    """

    sent: Blocks
    sent_to: tuple[int, ...]
    received_from: tuple[int, ...]
    order: Blocks
    stacks: tuple[Stack, ...]


def plan_route(layout: FlatLayout, shard: int) -> Route:
    """Plan which blocks `shard` sends and receives, in a layout from `split_matrices`.

    A single shard sends its blocks to itself, which sorts them in the order of the stacks.
    """
    shapes = {
        tensor.name: tensor.shape
        for tensor in layout.tensors
        if is_hidden_matrix(tensor.name, tensor.shape)
    }
    owners = dict(
        zip(shapes, assign_matrices(list(shapes.values()), layout.num_shards), strict=True)
    )
    # Matrices of the same owner and shape are adjacent, so that they can form stacks.
    names = sorted(shapes, key=lambda name: (owners[name], shapes[name], name))
    held = [_blocks_by_tensor(layout, source) for source in range(layout.num_shards)]
    mine = [name for name in names if owners[name] == shard]
    to_owner = [
        np.concatenate(
            [_NO_BLOCKS, *(held[shard][name] for name in names if owners[name] == owner)]
        )
        for owner in range(layout.num_shards)
    ]
    from_shards = [[len(held[source][name]) for name in mine] for source in range(len(held))]
    matrices = np.concatenate(
        [_NO_BLOCKS, *(np.repeat(np.arange(len(mine)), n) for n in from_shards)]
    )
    return Route(
        sent=np.concatenate(to_owner),
        sent_to=tuple(map(len, to_owner)),
        received_from=tuple(map(sum, from_shards)),
        order=np.argsort(matrices, kind="stable"),  # a matrix's pieces arrive in shard order
        stacks=tuple(_stacks([shapes[name] for name in mine])),
    )


_NO_BLOCKS: Blocks = np.zeros(0, dtype=np.int64)


def _blocks_by_tensor(layout: FlatLayout, shard: int) -> Mapping[str, Blocks]:
    """Return the numbers of the blocks of each tensor in a shard's buffers, by tensor name."""
    held = {tensor.name: _NO_BLOCKS for tensor in layout.tensors}
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
