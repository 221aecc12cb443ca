"""Functions with which a process joins the group of ranks, exchanges values, and leaves it."""

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mlperf_bert.config.sections import BalancePolicy
from mlperf_bert.distributed.failures import GRACE, naming_failures, watchdog
from mlperf_bert.distributed.launch import (
    RankInfo,
    choose_device,
    read_rank_info,
    set_cpu_threads,
)
from mlperf_bert.distributed.rendezvous import init_process_group, shutdown, warn_if_waiting
from mlperf_bert.distributed.signal_watch import Whereabouts, end_with_parent
from mlperf_bert.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LostRanksError,
    UserError,
    one_line,
    say_error,
)

Result = TypeVar("Result")
Plain = TypeVar("Plain", int, str, list[Any], dict[str, Any], list[str] | None)
MOST_BYTES = 16 * 2**20  # maximum for one rank's value, such as a timeline of 100 bytes per event
_ERRORS = (ConfigError, DataError, CheckpointError, LostRanksError, UserError)  # base classes last
_NO_RANK = (
    "start all ranks with the same version of this program, and keep the job's ports closed to "
    "other networks"
)
PATIENCE = timedelta(minutes=10)  # how long commands without a config wait for other ranks


def on_every_rank(info: RankInfo, action: Callable[[], Result]) -> Result:
    """Run `action` on every rank. If it fails on any rank, raise the same UserError on all ranks.

    The error is that of the lowest rank that failed. Without this function, the other ranks would
    wait for the failed one, and exit with an error of gloo or NCCL. All ranks must call this
    function.
    """
    error: list[str] | None = None
    try:
        result = action()
    except UserError as raised:
        error = _to_plain(raised)
    error = next((found for found in from_all_ranks(info, error) if found is not None), None)
    if error is not None:
        kind, *words = error
        shared = next(each for each in _ERRORS if each.__name__ == kind)(*words)
        shared.is_of_all_ranks = True
        raise shared
    return result


def _to_plain(error: UserError) -> list[str]:
    """Convert an error to its class name and its shortened arguments, which can be sent as JSON."""
    kind = next(each for each in _ERRORS if isinstance(error, each))
    return [kind.__name__, *map(one_line, error.args)]


def on_rank_zero(info: RankInfo, action: Callable[[], None]) -> None:
    """Run `action` on rank 0 while the others wait. If it fails, raise its error on every rank.

    All ranks must call this function.
    """
    on_every_rank(info, action if info.rank == 0 else lambda: None)


def from_all_ranks(info: RankInfo, value: Plain) -> list[Plain]:
    """Gather one value from every rank, and return the values in the order of the ranks.

    Values are sent as JSON of at most MOST_BYTES bytes, so a tuple arrives as a list. All ranks
    must call this function. Raises LostRanksError if the received bytes are invalid.
    """
    own = _encode(value)
    if info.world_size == 1:
        return [_decode(0, own)]
    sizes = [torch.tensor([0], device=own.device) for _ in range(info.world_size)]
    dist.all_gather(sizes, torch.tensor([len(own)], device=own.device))
    lengths = [_checked(rank, int(size)) for rank, size in enumerate(sizes)]
    row = own.new_zeros(max(lengths))
    row[: len(own)] = own
    rows = [torch.empty_like(row) for _ in lengths]
    dist.all_gather(rows, row)
    texts = zip(rows, lengths, strict=True)
    return [_decode(rank, text[:length]) for rank, (text, length) in enumerate(texts)]


def from_rank_zero(info: RankInfo, value: Plain) -> Plain:
    """Broadcast rank 0's value to every rank, and return that value.

    The limits and errors are those of `from_all_ranks`. All ranks must call this function.
    """
    found: Plain = from_all_ranks(info, [value] if info.rank == 0 else [])[0][0]
    return found


def make_exchange_group(
    policy: BalancePolicy, info: RankInfo, ranks_per_node: int
) -> dist.ProcessGroup | None:
    """Create the process group in which ranks exchange samples under a balance policy.

    Returns None if the policy exchanges no samples. The group contains all ranks, or those of a
    node, and uses gloo on the CPU. It is separate from the gradients' group, so that collectives of
    the loader's thread never mix with the trainer's.

    All ranks must call this function, because torch requires every rank to create the groups of all
    nodes in the same order. Call it after `check_nodes`, and in the init phase, because connecting
    the ranks takes time.
    """
    size = info.world_size if policy == "exchange_global" else ranks_per_node
    if not policy.startswith("exchange_") or size == 1:
        return None
    own: dist.ProcessGroup | None = None
    for start in range(0, info.world_size, size):
        ranks = list(range(start, start + size))
        group = dist.new_group(ranks, backend="gloo")
        if info.rank in ranks:
            assert isinstance(group, dist.ProcessGroup)  # others get a number
            own = group
    dist.all_reduce(torch.zeros(1), group=own)
    return own


def check_nodes(field: str, value: str, info: RankInfo, ranks_per_node: int) -> None:
    """Raise ConfigError if a setting groups ranks by node, but a node's ranks are not consecutive.

    `field` and `value` are the name and the value of the setting. All ranks must call this
    function. If a rank finds an error, all ranks raise it.
    """
    if value in ("exchange_local", "zero1_node"):
        on_every_rank(info, lambda: _check_node(field, value, info, ranks_per_node))


def _check_node(field: str, value: str, info: RankInfo, ranks_per_node: int) -> None:
    first = info.node_rank * ranks_per_node
    if info.local_world_size != ranks_per_node or info.rank != first + info.local_rank:
        raise ConfigError(
            field,
            f"{value!r} needs {ranks_per_node} consecutive ranks per node, but rank {info.rank} is "
            f"number {info.local_rank} of {info.local_world_size} on node {info.node_rank}",
            "set parallel.ranks_per_node to the number of ranks per node, and place ranks node by "
            "node",
        )


def _encode(value: Any) -> Tensor:
    """Encode `value` as JSON, uint8 [bytes], on the device that the collectives use."""
    text = json.dumps(value).encode()
    assert len(text) <= MOST_BYTES
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to("cuda" if on_gpu else "cpu")


def _checked(rank: int, size: int) -> int:
    if not 0 < size <= MOST_BYTES:
        problem = f"this rank sent a message of {size:,} bytes, so it does not run this program"
        raise LostRanksError(f"rank {rank}", problem, _NO_RANK)
    return size


def _decode(rank: int, text: Tensor) -> Any:
    try:
        return json.loads(text.cpu().numpy().tobytes())
    except (ValueError, RecursionError):
        raise LostRanksError(f"rank {rank}", "this rank sent invalid JSON", _NO_RANK) from None


def in_session(
    run: Callable[[RankInfo, torch.device], int],
    device_name: Literal["auto", "cpu", "cuda"],
    share_gpu: Literal["refuse", "allow"],
    info: RankInfo | None = None,
    patience: timedelta = PATIENCE,
    whereabouts: Whereabouts | None = None,
) -> int:
    """Join the process group, call `run` with this rank and its device, and leave the group.

    Returns the status that `run` returns. `run` is a function, so that everything it created is
    freed before the process leaves the group (`_leave`). If `whereabouts` is given, `run` must keep
    it up to date. Every error then names this rank and its activity, and the process ends if it
    makes no progress for `patience`. `info` is the rank of this process if it differs from the
    launcher's (reader_roles.py). Raises LostRanksError if other ranks have died or do not answer
    within `patience`.
    """
    info = info or read_rank_info()
    if info.launcher == "torchrun":
        end_with_parent(os.getppid())
    device = choose_device(device_name, info, share_gpu)
    set_cpu_threads(info)
    leaves_together = False
    with naming_failures(info, whereabouts, patience):
        try:
            with warn_if_waiting(info):
                init_process_group(info, device, timeout=patience + GRACE)
            with watchdog(info, whereabouts, patience) if whereabouts else nullcontext():
                status = run(info, device)
            leaves_together = True
            if whereabouts:
                whereabouts.at("end")
            if info.world_size > 1:
                # Launchers end all ranks when one leaves, and rank 0 may still be writing.
                dist.barrier()
            return status
        except UserError as error:
            if error.is_of_all_ranks:
                if info.rank == 0:  # at once, because launchers end all ranks when one leaves
                    say_error(error)
                error.is_said = True
                in_start_up = whereabouts is None or whereabouts.in_start_up
                leaves_together = in_start_up and device.type == "cpu"
            raise
        finally:
            # After an error of one rank, the others wait for it in collectives. Leaving the group
            # would wait for these collectives, and on a GPU for graphs and kernels that never end.
            # So the process ends without leaving (__main__.entry), which closes its connections.
            if leaves_together:
                _leave()


def _leave() -> None:
    """Leave the process group after freeing everything that refers to it.

    DistributedDataParallel refers to the group and is part of a reference cycle. If Python collects
    this cycle after the process has left the group, Python ends gloo's threads while it holds the
    GIL. A thread that still has to free one of our hooks needs the GIL, so Python and this thread
    wait forever. That happened in 1 of 40 tries with torch 2.13. If the process does not leave the
    group at all, the threads may abort the process when the interpreter exits. That happened in 3
    of 6 evaluations on two ranks.
    """
    error = sys.exception()
    while error is not None:
        traceback.clear_frames(error.__traceback__)  # which refer to objects that `run` created
        error = error.__context__
    gc.collect()
    shutdown()
