"""What a rank writes of a checkpoint, copied to the host first, and how a rank takes it over again.

Optimizer state is a safetensors file for each shard, readable by other shards. A file holds
`<parameter>.<slot>` for the part of each parameter that its rank owns: in the parameter's shape
where that is all of it, else flat. `ranges` in its metadata gives the part, as [first, last) of the
flattened parameter. A name without a slot is a scalar, equal in all files.

Every rank also has random streams and units of FP8 products of its own. Dropout of ours is keyed by
seed, step and sample and needs no stream; kernels of others draw from torch's generators. FP8 units
follow the maxima that a rank has seen in its own samples.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlperf_bert.checkpoint.manifest import ELSE
from mlperf_bert.checkpoint.state import CheckpointState
from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.distributed.bucket_plan import Segment
from mlperf_bert.distributed.flat_reducer import renamed
from mlperf_bert.distributed.launch import RankInfo
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
_FP8 = "fp8."


class HostCopies:
    """Copies of tensors in host memory that is taken once and filled again for each checkpoint.

    On CUDA it is pinned: the copies are queued behind the training that they follow, and training
    goes on before they are there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}
        self._event: torch.cuda.Event | None = None

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, whole when `wait` has returned; valid until the next of that name."""
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = self._kept[name] = self._memory_like(tensor)
        return kept.copy_(tensor, non_blocking=True)

    def queued(self) -> None:
        """All copies are asked for."""
        if self._device.type == "cuda":
            self._event = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Return when all that was queued is there."""
        if self._event is not None:
            with torch.cuda.device(self._device):  # a thread begins on device 0
                self._event.synchronize()  # host sync, in the writer's thread

    def _memory_like(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # where the machine may not pin so much, copies wait
                return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return torch.empty(tensor.shape, dtype=tensor.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One rank's part, on the host; where it writes none of a kind, nothing of it."""

    state: CheckpointState
    weights: Mapping[str, Tensor]  # rank 0's
    fp8: Mapping[str, Tensor]  # rank 0's
    optimizer: Mapping[str, Tensor]  # of a rank that holds a shard
    optimizer_metadata: Mapping[str, str]
    rank_states: Mapping[str, Tensor]  # of all ranks, rank 0's


@torch.no_grad()
def take_snapshot(
    state: CheckpointState,
    optimizer: FlatOptimizer,
    fp8_state: Mapping[str, Tensor],
    info: RankInfo,
    device: torch.device,
    copies: HostCopies,
) -> Snapshot:
    """Copy this rank's part. Every rank must call it at the same time, between two steps."""
    is_first = info.rank == 0
    weights = optimizer.exact_weights(keep=is_first, copy=copies)
    rank_states = gather_rank_states(fp8_state, info, device, copies)
    tensors: Mapping[str, Tensor] = {}
    metadata: Mapping[str, str] = {}
    if info.rank < optimizer.num_shards:
        tensors, metadata = shard_tensors(optimizer, copies)
    fp8 = {name: copies(f"fp8 {name}", each) for name, each in fp8_state.items()}
    copies.queued()
    return Snapshot(
        state=state,
        weights=weights,
        fp8=fp8 if is_first else {},
        optimizer=tensors,
        optimizer_metadata=metadata,
        rank_states=rank_states,
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


def gather_rank_states(
    fp8_state: Mapping[str, Tensor], info: RankInfo, device: torch.device, copy: Copy
) -> dict[str, Tensor]:
    """The states of all ranks by name, [ranks, ...] each, copied by `copy`; rank 0's alone."""
    mine = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(device)
    mine |= {f"{_FP8}{name}": tensor for name, tensor in fp8_state.items()}
    gathered = {}
    for name, tensor in mine.items():
        own = tensor.to(device)[None]
        of_all = own
        if info.world_size > 1:
            of_all = own.new_empty((info.world_size, *tensor.shape))
            renamed("all_gather_into_tensor", "all_gather_single")(of_all, own)
        if info.rank == 0:
            gathered[name] = copy(f"of all ranks {name}", of_all)
    return gathered


def set_rank_states(
    states: Mapping[str, Tensor], fp8_state: Mapping[str, Tensor], rank: int, device: torch.device
) -> None:
    """Go on from a rank's states, as gathered; what they do not hold stays as it is.

    Raises IndexError, RuntimeError or TypeError where they are no states of these.
    """
    # Clones: torch reads from the beginning of a tensor's storage, whatever part of it is meant.
    if "cpu" in states:
        torch.set_rng_state(states["cpu"][rank].clone())
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"][rank].clone(), device)
    for name, tensor in fp8_state.items():
        if f"{_FP8}{name}" in states:
            tensor.copy_(states[f"{_FP8}{name}"][rank])
