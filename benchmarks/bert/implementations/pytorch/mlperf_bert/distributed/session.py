"""A process's session among the ranks: join the others, talk to them, leave in order.

Before training, one all-reduce whose sums every rank knows shows whether they are exactly right.
`network-test` makes it with more bytes, and shows how fast it is.
"""

import gc
import json
import os
import statistics
import sys
import time
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
    host_name,
    init_process_group,
    naming_the_awaited,
    read_rank_info,
    set_cpu_threads,
    shutdown,
)
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
MOST_BYTES = 16 * 2**20  # a rank's value; the longest are timelines, 100 bytes an event
_ERRORS = (ConfigError, DataError, CheckpointError, LostRanksError, UserError)  # bases last
_NO_RANK = "keep the ports of a job inside its cluster, and start its ranks with one version"
_SMALL_BYTES = 4 * 2**20
_LARGE_BYTES = 64 * 2**20
_ROUNDS = 3
# A sum of 14,000 ranks stays below 2**24: in fp32 every whole number up to there is exact, so the
# order in which ranks are added does not matter.
_LARGEST_NUMBER, _LARGEST_FACTOR = 251, 8
PATIENCE = timedelta(minutes=10)  # patience with other ranks, if no config sets it


def on_every_rank(info: RankInfo, action: Callable[[], Result]) -> Result:
    """Run `action` on every rank; if any fails, the first one's UserError is raised on all.

    Otherwise the others would wait for the one that left, and end with gloo's or NCCL's error.
    """
    error: list[str] | None = None
    try:
        result = action()
    except UserError as raised:
        error = _told(raised)
    error = next((found for found in from_all_ranks(info, error) if found is not None), None)
    if error is not None:
        kind, *words = error
        shared = next(each for each in _ERRORS if each.__name__ == kind)(*words)
        shared.is_of_all_ranks = True
        raise shared
    return result


def _told(error: UserError) -> list[str]:
    """An error in its form for travel: the name of its kind, and its words, cut as when shown."""
    kind = next(each for each in _ERRORS if isinstance(error, each))
    return [kind.__name__, *map(one_line, error.args)]


def on_rank_zero(info: RankInfo, action: Callable[[], None]) -> None:
    """Run `action` on rank 0 while the others wait; its UserError is raised on every rank."""
    on_every_rank(info, action if info.rank == 0 else lambda: None)


def from_all_ranks(info: RankInfo, value: Plain) -> list[Plain]:
    """All ranks' values, in rank order, on every rank.

    They travel as JSON, so a tuple arrives as a list; at most MOST_BYTES a rank. Raises
    LostRanksError if the received bytes are invalid.
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
    """Rank 0's value, on every rank; see `from_all_ranks`."""
    found: Plain = from_all_ranks(info, [value] if info.rank == 0 else [])[0][0]
    return found


def make_exchange_group(
    policy: BalancePolicy, info: RankInfo, ranks_per_node: int
) -> dist.ProcessGroup | None:
    """The group in which a policy exchanges samples; None if it exchanges nothing.

    It has all ranks or those of a node, over gloo, on the CPU. It is separate from the gradients'
    group, so that collectives of the loader's thread never mix with the trainer's.

    Every rank must call it, in the init phase and after `check_nodes`: it creates every node's
    group in the same order and makes the connections.
    """
    size = info.world_size if policy == "exchange_global" else ranks_per_node
    if not policy.startswith("exchange_") or size == 1:
        return None
    own: dist.ProcessGroup | None = None
    for start in range(0, info.world_size, size):
        ranks = list(range(start, start + size))
        group = dist.new_group(ranks, backend="gloo")
        if info.rank in ranks:
            own = group
    dist.all_reduce(torch.zeros(1), group=own)
    return own


def check_nodes(field: str, value: str, info: RankInfo, ranks_per_node: int) -> None:
    """Raise ConfigError if a field's value works within nodes, but nodes lack consecutive ranks.

    Every rank must call it: an error on one is raised on all.
    """
    if value in ("exchange_local", "zero1_node"):
        on_every_rank(info, lambda: _check_node(field, value, info, ranks_per_node))


def _check_node(field: str, value: str, info: RankInfo, ranks_per_node: int) -> None:
    first = info.node_rank * ranks_per_node
    if info.local_world_size != ranks_per_node or info.rank != first + info.local_rank:
        raise ConfigError(
            field,
            f"{value!r} needs nodes of {ranks_per_node} consecutive ranks, rank {info.rank} "
            f"is number {info.local_rank} of {info.local_world_size} on node {info.node_rank}",
            "set parallel.ranks_per_node to the ranks of a machine and place them node by node",
        )


def _encode(value: Any) -> Tensor:
    """The bytes of `value` as JSON, on the device of the ranks' collectives."""
    text = json.dumps(value).encode()
    assert len(text) <= MOST_BYTES
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to("cuda" if on_gpu else "cpu")


def _checked(rank: int, size: int) -> int:
    if not 0 < size <= MOST_BYTES:
        raise LostRanksError(f"rank {rank}", f"sent {size:,} bytes, an impossible size", _NO_RANK)
    return size


def _decode(rank: int, text: Tensor) -> Any:
    try:
        return json.loads(text.cpu().numpy().tobytes())
    except (ValueError, RecursionError):
        raise LostRanksError(f"rank {rank}", "sent invalid data", _NO_RANK) from None


def check_sums(info: RankInfo, device: torch.device, num_bytes: int = _SMALL_BYTES) -> float:
    """Sum known numbers over all ranks, and return the seconds that this rank's all-reduce took.

    A broken GPU, cable or network card may add wrongly without raising an error, and nothing else
    would notice. Rank r contributes 1, 2 ... 251, 1, 2 ..., all times 1 + r % 8, as `num_bytes` of
    fp32. Every rank must call it; one rank alone has nothing to sum. Raises UserError on all ranks
    if one of them gets a wrong sum.
    """
    if info.world_size == 1:
        return 0.0
    backend = dist.get_backend()
    place = device if backend == "nccl" else torch.device("cpu")
    numbers = torch.arange(num_bytes // 4, dtype=torch.float32, device=place)
    numbers.remainder_(_LARGEST_NUMBER).add_(1)
    sums = numbers * _factor(info.rank)
    _wait_for(place)
    start = time.perf_counter()
    dist.all_reduce(sums)
    _wait_for(place)
    seconds = time.perf_counter() - start
    numbers *= sum(map(_factor, range(info.world_size)))
    own = "" if torch.equal(sums, numbers) else f"rank {info.rank} on {host_name()}"
    wrong = list(filter(None, from_all_ranks(info, own)))
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        problem = f"the all-reduce gave wrong sums on {wrong[0]}{more}"
        remedy = "look for a broken GPU, cable or network card, and leave its host out"
        error = UserError(backend, problem, remedy)
        error.is_of_all_ranks = True
        raise error
    return seconds


def measure_sums(info: RankInfo, device: torch.device) -> str:
    """The check with 64 MiB, several times: what was found, in words.

    The rate is the bus bandwidth, which does not depend on the number of ranks: bytes per second
    that each rank sends, and receives. Every rank must call it. Raises UserError as `check_sums`.
    """
    if info.world_size == 1:
        return "one rank, which has nothing to sum"
    check_sums(info, device)  # makes the connections
    own = statistics.median(check_sums(info, device, _LARGE_BYTES) for _ in range(_ROUNDS))
    (slowest,) = max(from_all_ranks(info, [own]))
    rate = 2 * (info.world_size - 1) / info.world_size * _LARGE_BYTES / max(slowest, 1e-9)
    return (
        f"{info.world_size} ranks over {dist.get_backend()}: sums exactly right, {rate / 1e9:.2f} "
        f"GB/s bus bandwidth ({_LARGE_BYTES // 2**20} MiB in {1e3 * slowest:.1f} ms)"
    )


def _factor(rank: int) -> int:
    return 1 + rank % _LARGEST_FACTOR


def _wait_for(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)  # a measurement: the host must know when it ends


def in_session(
    run: Callable[[RankInfo, torch.device], int],
    device_name: Literal["auto", "cpu", "cuda"],
    share_gpu: Literal["refuse", "allow"],
    info: RankInfo | None = None,
    patience: timedelta = PATIENCE,
    whereabouts: Whereabouts | None = None,
) -> int:
    """Call `run` with this rank and its device, inside the process group of all ranks.

    Raises LostRanksError if other ranks do not answer within `patience`, or are gone. With
    `whereabouts`, which `run` keeps up to date, every error names this rank and what it was doing,
    and the process ends if it does nothing new for that long. `info` is this process's rank if it
    differs from the launcher's (reader_roles.py). `run` is a function so that all it built is freed
    before the group is left (`_leave`).
    """
    info = info or read_rank_info()
    if info.launcher == "torchrun":
        end_with_parent(os.getppid())
    device = choose_device(device_name, info, share_gpu)
    set_cpu_threads(info)
    leaves_together = False
    with naming_failures(info, whereabouts, patience):
        try:
            with naming_the_awaited(info):
                init_process_group(info, device, timeout=patience + GRACE)
            with watchdog(info, whereabouts, patience) if whereabouts else nullcontext():
                status = run(info, device)
            leaves_together = True
            if whereabouts:
                whereabouts.at("end")
            if info.world_size > 1:
                dist.barrier()  # a launcher ends all ranks when one leaves; rank 0 may still write
            return status
        except UserError as error:
            if error.is_of_all_ranks:
                if info.rank == 0:  # at once: when a rank leaves, launchers end the others
                    say_error(error)
                error.is_said = True
                in_start_up = whereabouts is None or whereabouts.in_start_up
                leaves_together = in_start_up and device.type == "cpu"
            raise
        finally:
            # After an error of one rank the others wait for it in collectives, and to leave the
            # group would wait for those; on a GPU also for graphs and kernels that never end. So
            # the process ends without (__main__.entry), and the others see its connections close.
            if leaves_together:
                _leave()


def _leave() -> None:
    """Leave the process group once nothing else holds it, also if all ranks raise one error.

    DistributedDataParallel is part of a reference cycle and holds the group. If it is collected
    after the group was left, it ends gloo's threads while holding Python's lock; a thread that must
    still free a hook of ours needs that lock, and both wait for ever (torch 2.13: once in 40
    tries). Left to the end of the interpreter, the threads end in SIGABRT (3 of 6 evaluations on
    two ranks).
    """
    error = sys.exception()
    while error is not None:
        traceback.clear_frames(error.__traceback__)  # they hold objects that `run` built
        error = error.__context__
    gc.collect()
    shutdown()
