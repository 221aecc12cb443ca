"""The random streams of all ranks, for a checkpoint."""

import torch
import torch.distributed as dist
from torch import Tensor


def gather_random_states(world_size: int, device: torch.device) -> list[dict[str, Tensor]]:
    """Every rank's generator states, in rank order."""
    mine = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(device)
    if world_size == 1:
        return [mine]
    gathered = {}
    through = device if dist.get_backend() == "nccl" else torch.device("cpu")
    for name, tensor in mine.items():
        parts = [torch.empty_like(tensor, device=through) for _ in range(world_size)]
        dist.all_gather(parts, tensor.to(through))
        gathered[name] = [part.cpu() for part in parts]
    return [{name: parts[r] for name, parts in gathered.items()} for r in range(world_size)]
