"""One process's time among the ranks: find out who it is, join the others, leave in order."""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

from mlperf_bert.distributed.launch import (
    RankInfo,
    choose_device,
    init_process_group,
    read_rank_info,
    set_cpu_threads,
    shutdown,
)


@contextlib.contextmanager
def joined(
    device_name: Literal["auto", "cpu", "cuda"], share_gpu: Literal["refuse", "allow"]
) -> Iterator[tuple[RankInfo, torch.device]]:
    """Yield this rank and its device, with the process group of all ranks up."""
    info = read_rank_info()
    device = choose_device(device_name, info, share_gpu)
    if device.type == "cpu":
        set_cpu_threads(info)
    init_process_group(info, device)
    try:
        yield info, device
    finally:
        shutdown()
