"""The random streams of all ranks, for a checkpoint.

Dropout of ours is keyed by seed, step and sample and needs none of them; kernels of others draw
from torch's generators.
"""

from collections.abc import Mapping

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


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on from a rank's states; a generator that they do not hold stays as it is.

    Raises RuntimeError or TypeError where they are no states of these generators.
    """
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
