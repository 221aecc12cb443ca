"""What every rank has of its own: random streams, and units of FP8 products.

Dropout of ours is keyed by seed, step and sample and needs no stream; kernels of others draw from
torch's generators. FP8 units follow the maxima that a rank has seen in its own samples.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mlperf_bert.distributed.flat_reducer import renamed
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.optim.flat_optimizer import Copy

_FP8 = "fp8."


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
