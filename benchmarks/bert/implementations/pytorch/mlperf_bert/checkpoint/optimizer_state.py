"""Optimizer state in a checkpoint: a safetensors file for each shard, readable by other shards.

A file holds `<parameter>.<slot>` for the part of each parameter that its rank owns: in the
parameter's shape where that is all of it, else flat. `ranges` in its metadata gives the part, as
[first, last) of the flattened parameter. A name without a slot is a scalar, equal in all files.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mlperf_bert.checkpoint.manifest import ELSE
from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.distributed.bucket_plan import Segment
from mlperf_bert.optim.flat_optimizer import Copy, FlatOptimizer

# What reading a file raises that is damaged, or is not of this format.
_UNREADABLE = (
    OSError,
    AttributeError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)


def shard_tensors(optimizer: FlatOptimizer, copy: Copy) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What the file of this rank's shard holds, copied by `copy`, and the file's metadata."""
    scalars = optimizer.scalar_state().items()
    tensors = {name: copy(name, value) for name, value in scalars}
    flat_state = {slot: copy(slot, flat) for slot, flat in optimizer.flat_state().items()}
    ranges = {}
    for segment in optimizer.segments():
        ranges[segment.tensor.name] = [segment.first, segment.last]
        for slot, flat in flat_state.items():
            part = flat[segment.in_shard]
            shape = segment.tensor.shape if segment.is_whole else part.shape
            tensors[f"{segment.tensor.name}.{slot}"] = part.view(shape)
    return tensors, {"ranges": json.dumps(ranges)}


def read_shards(optimizer: FlatOptimizer, paths: Sequence[Path]) -> None:
    """Fill this rank's shard from the files of all shards, however many they were.

    Where they have no loss scale, this optimizer's stays. Raises CheckpointError where a file is
    damaged or the parts do not make up this state.
    """
    from safetensors import SafetensorError, safe_open  # `bench` imports this file, reads no state

    wanted = {segment.tensor.name: segment for segment in optimizer.segments()}
    missing = {name: segment.last - segment.first for name, segment in wanted.items()}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                ranges = json.loads(file.metadata()["ranges"])
                for name in ranges.keys() & wanted.keys():
                    missing[name] -= _copy_part(file, optimizer, wanted[name], *ranges[name])
                scalars = optimizer.scalar_state()
                for name in scalars.keys() & {"updates", *file.keys()}:
                    scalars[name].copy_(file.get_tensor(name))
        except (SafetensorError, *_UNREADABLE) as error:
            raise CheckpointError(str(path), f"unreadable ({error})", ELSE) from None
    for name, elements in missing.items():
        if elements:
            where = str(paths[0].parent) if paths else "optimizer"
            problem = f"lacks {elements:,} elements of {name}"
            raise CheckpointError(where, problem, "use the config it was made with")


def _copy_part(file: Any, optimizer: FlatOptimizer, wanted: Segment, first: int, last: int) -> int:
    """Copy what a file's part [first, last) has of the wanted one; how many elements."""
    begin, end = max(first, wanted.first), min(last, wanted.last)
    if begin >= end:
        return 0
    for slot, flat in optimizer.flat_state().items():
        part = file.get_tensor(f"{wanted.tensor.name}.{slot}").view(-1)
        start = wanted.start + begin - wanted.first
        flat[start : start + end - begin].copy_(part[begin - first : end - first])
    return end - begin
