"""One process's time among the ranks: find out who it is, join the others, leave in order."""

import gc
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from mlperf_bert.distributed.binding import NOT_ASKED, bind
from mlperf_bert.distributed.device import choose_device
from mlperf_bert.distributed.failures import GRACE, naming_failures, watching
from mlperf_bert.distributed.launch import (
    RankInfo,
    init_process_group,
    read_rank_info,
    shutdown,
)
from mlperf_bert.distributed.threads import set_cpu_threads
from mlperf_bert.end_with_parent import end_with_parent
from mlperf_bert.errors import UserError
from mlperf_bert.whereabouts import Whereabouts

Result = TypeVar("Result")
PATIENCE = timedelta(minutes=10)  # with other ranks, where no config sets it


def on_every_rank(info: RankInfo, action: Callable[[], Result]) -> Result:
    """Run `action` on every rank; where any fails, the first one's UserError is raised on all.

    Otherwise the others would wait for the one that left, and end with gloo's or NCCL's error.
    """
    error: UserError | None = None
    try:
        result = action()
    except UserError as raised:
        error = raised
    error = next((found for found in from_all_ranks(info, error) if found is not None), None)
    if error is not None:
        raise error
    return result


def on_rank_zero(info: RankInfo, action: Callable[[], None]) -> None:
    """Run `action` on rank 0 while the others wait; its UserError is raised on every rank."""
    on_every_rank(info, action if info.rank == 0 else lambda: None)


def from_all_ranks(info: RankInfo, value: Result) -> list[Result]:
    """What every rank has, in their order, on every rank; it travels as a pickle."""
    values = [value] * info.world_size
    if info.world_size > 1:
        dist.all_gather_object(values, value)
    return values


def from_rank_zero(info: RankInfo, value: Result) -> Result:
    """What rank 0 has, on every rank."""
    if info.world_size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def in_session(
    run: Callable[[RankInfo, torch.device], int],
    device_name: Literal["auto", "cpu", "cuda"],
    share_gpu: Literal["refuse", "allow"],
    info: RankInfo | None = None,
    patience: timedelta = PATIENCE,
    binding: Literal["auto", "none"] = "auto",
    whereabouts: Whereabouts | None = None,
) -> int:
    """Call `run` with this rank and its device, the process group of all ranks up.

    Raises LostRanksError where other ranks do not answer within `patience`, or have gone. With
    `whereabouts`, which `run` keeps up to date, every error names this rank and what it was doing,
    and the process is ended where it does nothing new for as long.
    `info` is who this process is, where that is not what the launcher says (reader_roles.py).
    `run` is a function so that all it built is gone when the group is left (`_leave`).
    """
    info = info or read_rank_info()
    if info.launcher == "torchrun":
        end_with_parent(os.getppid())
    device = choose_device(device_name, info, share_gpu)
    bound = bind(info, device) if binding == "auto" else NOT_ASKED
    info = replace(info, binding=bound.words)
    set_cpu_threads(info, own_cores=bound.num_cores)
    status = None
    with naming_failures(info, whereabouts, patience):
        try:
            init_process_group(info, device, timeout=patience + GRACE)
            with watching(info, whereabouts, patience) if whereabouts else nullcontext():
                status = run(info, device)
            if whereabouts:
                whereabouts.at("end")
            if info.world_size > 1:
                dist.barrier()  # a launcher ends all ranks when one leaves; rank 0 may still write
            return status
        finally:
            if status is not None or device.type == "cpu":
                # After an error NCCL would wait for graphs and kernels that never end, and the
                # error's message with it; the process leaves without (__main__.entry).
                _leave()


def _leave() -> None:
    """Leave the process group when nothing else holds it any more, even after an error.

    DistributedDataParallel is part of a reference cycle and holds the group. Collected after the
    group was left, it ends gloo's threads while it has Python's lock; one that still has a hook of
    ours to let go wants that lock, and both wait for ever (torch 2.13: once in 40 tries). Left to
    the end of the interpreter, the threads end in SIGABRT (3 of 6 evaluations on two ranks).
    """
    error = sys.exception()
    while error is not None:
        traceback.clear_frames(error.__traceback__)  # they hold what `run` built
        error = error.__context__
    gc.collect()
    shutdown()
