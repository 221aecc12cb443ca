"""One all-reduce whose sums every rank knows: whether they are exactly right, and how fast it is.

A broken GPU, cable or network card may add wrongly without raising an error, and nothing else
would notice. `train` makes this check in its init phase. `network-test` makes it with more bytes,
and shows the rate.
"""

import statistics
import time

import torch
import torch.distributed as dist

from mlperf_bert.distributed.launch import RankInfo, host_name
from mlperf_bert.distributed.session import from_all_ranks
from mlperf_bert.errors import UserError

_SMALL_BYTES = 4 * 2**20
_LARGE_BYTES = 64 * 2**20
_ROUNDS = 3
# A sum of 14,000 ranks stays below 2**24: in fp32 every whole number up to there is exact, so the
# order in which ranks are added does not matter.
_LARGEST_NUMBER, _LARGEST_FACTOR = 251, 8


def check_sums(info: RankInfo, device: torch.device, num_bytes: int = _SMALL_BYTES) -> float:
    """Sum known numbers over all ranks, and return the seconds that this rank's all-reduce took.

    Rank r contributes 1, 2 ... 251, 1, 2 ..., all times 1 + r % 8, as `num_bytes` of fp32. Every
    rank must call it; one rank alone has nothing to sum. Raises UserError on all ranks if one of
    them gets a wrong sum.
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


def measure(info: RankInfo, device: torch.device) -> str:
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
