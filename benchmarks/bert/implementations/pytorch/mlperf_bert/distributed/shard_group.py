"""The ranks among which optimizer state is cut up, and the collectives between them.

Of N ranks, either each owns all of the state (`flat`), or the ranks of a node own a shard each and
nodes are replicas of one another (`shard_node`), or all N own a shard each (`shard_world`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from mlperf_bert.config.sections import DataParallel
from mlperf_bert.distributed.launch import RankInfo


def num_shards(data_parallel: DataParallel, info: RankInfo) -> int:
    """In how many parts the optimizer's state is cut."""
    parts = {"shard_node": info.local_world_size, "shard_world": info.world_size}
    return parts.get(data_parallel, 1)


class ShardGroup:
    """Who holds the other shards, and who holds the same one.

    Consecutive ranks hold consecutive shards. Every rank must make it at the same time. What is
    begun with one call is waited for with another, so that it overlaps with what lies between.

    Args:
        count: shards; divides the number of ranks.
    """

    def __init__(self, info: RankInfo, count: int, device: torch.device) -> None:
        self.count = count
        self.index = info.rank % count
        ranks = range(info.world_size)
        self._shards = _group_of(info.rank, [ranks[i : i + count] for i in ranks[::count]])
        self._replicas = _group_of(info.rank, [ranks[i::count] for i in range(count)])
        # On a GPU the sum over the replicas follows that over the shards on a stream of its own.
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._reducing: list[Work] = []
        self._for_replicas: list[Tensor] = []
        self._gathering: dict[int, Work] = {}

    def reduce(self, whole: Tensor, piece: Tensor) -> None:
        """Begin to sum `whole` over all ranks; `piece` gets this rank's shard of the sum.

        Where there is one shard, both are the same memory.
        """
        if self._stream is None:
            self._begin(whole, piece)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._begin(whole, piece)
        whole.record_stream(self._stream)

    def wait_for_reduced(self) -> None:
        """Return when every piece is there (on a GPU: for work queued from here on)."""
        _wait_for(self._reducing)
        self._reducing += [_all_reduce(piece, self._replicas) for piece in self._for_replicas]
        self._for_replicas.clear()
        _wait_for(self._reducing)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def add_up(self, tensor: Tensor) -> None:
        """Sum `tensor` over the shards, in place, the same on each."""
        if self._shards is not None:
            dist.all_reduce(tensor, group=self._shards)

    def publish(self, number: int, whole: Tensor, piece: Tensor) -> None:
        """Begin to fill `whole`, bucket `number`, with every shard's `piece`, in their order."""
        if self._shards is not None:
            all_gather = renamed("all_gather_into_tensor", "all_gather_single")
            work: Work = all_gather(whole, piece, group=self._shards, async_op=True)
            self._gathering[number] = work

    def wait_for(self, number: int) -> None:
        """Return when bucket `number`, if published, is there (on a GPU: for work queued later)."""
        work = self._gathering.pop(number, None)
        if work is not None:
            work.wait()

    def wait(self) -> None:
        """Return when all that was published is there (on a GPU: for work queued from here on)."""
        for number in list(self._gathering):
            self.wait_for(number)

    def _begin(self, whole: Tensor, piece: Tensor) -> None:
        if self._shards is None:
            if self._replicas is not None:
                self._reducing.append(_all_reduce(piece, self._replicas))
            return
        reduce_scatter = renamed("reduce_scatter_tensor", "reduce_scatter_single")
        work: Work = reduce_scatter(piece, whole, group=self._shards, async_op=True)
        if self._stream is None or self._replicas is None:
            self._reducing.append(work)
            # gloo would hold up the host here: these wait until backward is done.
            self._for_replicas += [piece] * (self._replicas is not None)
            return
        work.wait()  # on this stream alone
        self._reducing.append(_all_reduce(piece, self._replicas))


def _group_of(rank: int, groups: Sequence[range]) -> Any:
    """The process group of the ranks with `rank`; None where it would be alone."""
    if len(groups[0]) == 1:
        return None
    if len(groups) == 1:
        return dist.group.WORLD
    made = [dist.new_group(list(ranks)) for ranks in groups]  # all ranks make all of them
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


def renamed(old: str, new: str) -> Callable[..., Any]:
    """A collective of torch.distributed that torch 2.13 gave another name."""
    found: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return found


def _all_reduce(tensor: Tensor, group: Any) -> Work:
    work: Work = dist.all_reduce(tensor, group=group, async_op=True)
    return work


def _wait_for(works: list[Work]) -> None:
    for work in works:
        work.wait()
    works.clear()
