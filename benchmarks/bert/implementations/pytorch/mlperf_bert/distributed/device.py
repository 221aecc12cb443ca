"""Which device a rank computes on."""

from typing import Literal

import torch

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.distributed.launch import RankInfo


def choose_device(
    name: Literal["auto", "cpu", "cuda"],
    info: RankInfo,
    share_gpu: Literal["refuse", "allow"] = "refuse",
) -> torch.device:
    """The device of this rank: `cuda:<local_rank>` or `cpu`; `auto` takes CUDA where there is one.

    Raises ConfigError for `cuda` without CUDA, and for more ranks on the node than GPUs unless
    they may share.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("run.device", "is 'cuda' but no CUDA device is usable", "use 'cpu'")
    gpus = torch.cuda.device_count()
    if info.local_world_size > gpus and share_gpu == "refuse":
        raise ConfigError(
            "run.device",
            f"{info.local_world_size} ranks on this node see {gpus} GPUs",
            "start one rank a GPU and let each see all (srun: --gpus-per-node, not per task)",
        )
    return torch.device("cuda", info.local_rank % gpus)
