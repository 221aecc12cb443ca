"""What a rank writes of a checkpoint, copied to the host first, so that training can go on."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from mlperf_bert.checkpoint.optimizer_state import shard_tensors
from mlperf_bert.checkpoint.rank_states import gather_rank_states
from mlperf_bert.checkpoint.state import CheckpointState
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.optim.flat_optimizer import FlatOptimizer


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
