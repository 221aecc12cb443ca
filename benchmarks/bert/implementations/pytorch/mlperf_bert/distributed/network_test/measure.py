"""The check `network`, the part on every rank: the collectives that are tried, and their times."""

import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mlperf_bert.distributed.launch import RankInfo, backend_for, shutdown

LARGE_BYTES = 64 * 2**20
PAIR_BYTES = 8 * 2**20
_CLOCK_ROUNDS = 5
_LATENCY_ROUNDS = 20
_LARGE_ROUNDS = 5
_PAIR_ROUNDS = 3
_LARGE_SECONDS = 5.0  # of all large ones; a slow link gets fewer of them


def measure(info: RankInfo, device: torch.device, store: Any, timeout_s: float) -> dict[str, Any]:
    """Join the other ranks and try the network; what this rank saw, ready for JSON.

    Every rank must call it. Raises RuntimeError where a collective fails; the process group is then
    left as it is, because taking it down may wait for ever.
    """
    backend = backend_for(info, device)
    place = device if backend == "nccl" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    names: Any = dist  # torch's stubs lack this one
    dist.init_process_group(
        backend,
        store=names.PrefixStore("network", store),
        rank=info.rank,
        world_size=info.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=place if backend == "nccl" else None,
    )
    start = time.perf_counter()
    sum_is_right = small_sum_is_right(info, place)  # the first one makes the connections
    seen = {
        "sum_is_right": sum_is_right,
        "connected_s": time.perf_counter() - start,
        "clock": [clock_round(info, place) for _ in range(_CLOCK_ROUNDS)],
        "latency_s": latency(place),
        "large": large_all_reduce(info, place),
        "pairs": pair_rates(info, place),
    }
    shutdown()
    return seen


def small_sum_is_right(info: RankInfo, place: torch.device) -> bool:
    """Whether an all-reduce of rank numbers, each times 1 .. 1024, is exactly right."""
    factors = torch.arange(1, 1025, device=place)
    numbers = factors * info.rank
    dist.all_reduce(numbers)
    return torch.equal(numbers, factors * sum(range(info.world_size)))


def clock_round(info: RankInfo, place: torch.device) -> list[float]:
    """This rank's time of day before an all-gather and after it.

    No rank is through before all have begun, which bounds how far two clocks are apart.
    """
    everyone = [torch.zeros(1, device=place) for _ in range(info.world_size)]
    began = time.time()
    dist.all_gather(everyone, torch.zeros(1, device=place))
    _wait_for(place)
    return [began, time.time()]


def latency(place: torch.device) -> float:
    """Median seconds of an all-reduce of one number."""
    number = torch.zeros(1, device=place)
    return statistics.median(
        _seconds(lambda: dist.all_reduce(number), place) for _ in range(_LATENCY_ROUNDS)
    )


def large_all_reduce(info: RankInfo, place: torch.device) -> dict[str, Any]:
    """LARGE_BYTES in fp32: median seconds, and whether every sum was exactly right."""
    values = torch.empty(LARGE_BYTES // 4, device=place)
    total = float(info.world_size * (info.world_size + 1) // 2)  # exact in fp32 to 5,792 ranks
    is_right, rounds = True, 1 + _LARGE_ROUNDS
    times: list[float] = []
    while len(times) < rounds:
        values.fill_(info.rank + 1)
        times.append(_seconds(lambda: dist.all_reduce(values), place))
        is_right = is_right and bool((values == total).all())
        if len(times) == 1:
            rounds = 1 + _affordable_rounds(times[0], place)
    return {"seconds": statistics.median(times[1:]), "is_right": is_right}


def _affordable_rounds(seconds: float, place: torch.device) -> int:
    """The same number on every rank, so they agree on the slowest one's time."""
    slowest = torch.tensor([seconds], device=place)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(1, min(_LARGE_ROUNDS, int(_LARGE_SECONDS / max(slowest.item(), 1e-6))))


def pair_rates(info: RankInfo, place: torch.device) -> dict[str, float]:
    """Bytes a second to and from each neighbour in the ring, at the same time: rank -> rate.

    In three turns of pairs that have no rank in common, so that a slow one slows no other.
    """
    rates: dict[str, float] = {}
    for turn in range(3):
        pairs = [pair for pair in ring_pairs(info.world_size, turn) if info.rank in pair]
        for first, second in pairs:
            peer = second if info.rank == first else first
            rates[str(peer)] = _exchange(peer, place)
        dist.barrier()
    return rates


def ring_pairs(world_size: int, turn: int) -> list[tuple[int, int]]:
    """Neighbours of a turn, no rank in two of them; turns 0 to 2 hold each link of the ring once.

    The third turn has the link that an odd ring leaves over.
    """
    if world_size < 2:
        return []
    links = [(rank, (rank + 1) % world_size) for rank in range(world_size)]
    if world_size == 2:
        links = links[:1]
    odd_one = [links.pop()] if world_size % 2 else []
    return (links[0::2], links[1::2], odd_one)[turn]


def _exchange(peer: int, place: torch.device) -> float:
    mine, theirs = (torch.zeros(PAIR_BYTES, dtype=torch.uint8, device=place) for _ in range(2))

    def both_ways() -> None:
        operations = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    _seconds(both_ways, place)  # makes the connection
    return PAIR_BYTES / min(_seconds(both_ways, place) for _ in range(_PAIR_ROUNDS))


def _seconds(action: Callable[[], object], place: torch.device) -> float:
    _wait_for(place)
    start = time.perf_counter()
    action()
    _wait_for(place)
    return max(time.perf_counter() - start, 1e-9)


def _wait_for(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)  # a measurement: the host has to know when it is over
