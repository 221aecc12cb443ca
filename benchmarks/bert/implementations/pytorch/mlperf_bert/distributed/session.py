"""One process's time among the ranks: find out who it is, join the others, leave in order."""

import gc
from collections.abc import Callable
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


def in_session(
    run: Callable[[RankInfo, torch.device], int],
    device_name: Literal["auto", "cpu", "cuda"],
    share_gpu: Literal["refuse", "allow"],
) -> int:
    """Call `run` with this rank and its device, the process group of all ranks up.

    `run` is a function so that all it built is gone when the group is left: a process group kept
    alive by a wrapped model or a reference cycle loses its threads at interpreter exit, which
    gloo answers with SIGABRT (seen in 3 of 6 evaluations on two ranks).
    """
    info = read_rank_info()
    device = choose_device(device_name, info, share_gpu)
    if device.type == "cpu":
        set_cpu_threads(info)
    init_process_group(info, device)
    try:
        return run(info, device)
    finally:
        shutdown()
        gc.collect()
