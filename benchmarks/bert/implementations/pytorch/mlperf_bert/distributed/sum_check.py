"""An all-reduce of known numbers, which checks the sums and the speed of the network.

`train` runs it before the clock starts. The command `network-test` runs it with more bytes, and
also measures the speed.
"""

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mlperf_bert.distributed.launch import RankInfo, host_name
from mlperf_bert.distributed.session import from_all_ranks
from mlperf_bert.errors import UserError

_MIB = 2**20
_SMALL_BYTES = 4 * _MIB
# Large enough that latency hardly matters. Published tests send 21 to 672 MB.
_LARGE_BYTES = {"gloo": 64 * _MIB, "nccl": 512 * _MIB}
_ROUNDS = 3
# The sums of 14,000 ranks stay below 2**24. In fp32, every integer up to there is exact, so the
# order in which ranks are added does not matter.
_LARGEST_NUMBER, _LARGEST_FACTOR = 251, 8


def check_sums(info: RankInfo, device: torch.device, num_bytes: int = _SMALL_BYTES) -> float:
    """Check an all-reduce of known numbers, and return the seconds that it took on this rank.

    A broken GPU, cable or network card may compute wrong sums without an error, and no other check
    would notice that. Rank r contributes the numbers 1 to 251 over and over, each multiplied by 1 +
    r % 8, as `num_bytes` of fp32. The function returns 0 if there is only one rank. All ranks must
    call it. Raises UserError on all ranks if one of them gets a wrong sum.
    """
    if info.world_size == 1:
        return 0.0
    backend = dist.get_backend()
    summed_on = device if backend == "nccl" else torch.device("cpu")
    numbers = torch.arange(num_bytes // 4, dtype=torch.float32, device=summed_on)
    numbers.remainder_(_LARGEST_NUMBER).add_(1)
    sums = numbers * _factor(info.rank)
    _wait_for(summed_on)
    start = time.perf_counter()
    dist.all_reduce(sums)
    _wait_for(summed_on)
    seconds = time.perf_counter() - start
    numbers *= sum(map(_factor, range(info.world_size)))
    own = "" if torch.equal(sums, numbers) else f"rank {info.rank} on {host_name()}"
    wrong = list(filter(None, from_all_ranks(info, own)))
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        problem = f"the all-reduce computed wrong sums on {wrong[0]}{more}"
        remedy = "look for a broken GPU, cable or network card, and exclude its host"
        error = UserError(backend, problem, remedy)
        error.is_of_all_ranks = True
        raise error
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The speed of an all-reduce of `num_bytes` bytes on its slowest rank.

    The bus bandwidth is the number of bytes per second that each rank sends and receives. It does
    not depend on the number of ranks. In an all-reduce over several nodes, every one of these bytes
    crosses the ports of each node once, so it is at most the rate of these ports.
    """

    world_size: int
    num_bytes: int
    seconds: float

    @property
    def bus_gb_s(self) -> float:
        """Bus bandwidth in GB/s (10^9 bytes per second)."""
        sent = 2 * (self.world_size - 1) / self.world_size * self.num_bytes
        return sent / max(self.seconds, 1e-9) / 1e9

    @property
    def in_words(self) -> str:
        """Describe the speed for the console."""
        return (
            f"bus bandwidth {self.bus_gb_s:.2f} GB/s ({self.num_bytes // _MIB} MiB in "
            f"{1e3 * self.seconds:.1f} ms)"
        )


def measure_sums(info: RankInfo, device: torch.device) -> Speed:
    """Run `check_sums` with many bytes three times, and return the median on the slowest rank.

    There must be at least two ranks, and all of them must call this function. Raises UserError like
    `check_sums`.
    """
    check_sums(info, device)  # creates the connections
    num_bytes = _LARGE_BYTES[dist.get_backend()]
    own = statistics.median(check_sums(info, device, num_bytes) for _ in range(_ROUNDS))
    (slowest,) = max(from_all_ranks(info, [own]))
    return Speed(world_size=info.world_size, num_bytes=num_bytes, seconds=slowest)


def _factor(rank: int) -> int:
    return 1 + rank % _LARGEST_FACTOR


def _wait_for(device: torch.device) -> None:
    """Wait until the device is idle, so that times measured on the host include its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
