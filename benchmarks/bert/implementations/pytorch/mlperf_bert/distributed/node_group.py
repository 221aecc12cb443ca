"""Process groups of the data exchange: all ranks or those of a node, over gloo, on the CPU.

They are apart from the group of the gradients, so that collectives of the loader's thread never
mix with the trainer's.
"""

import torch
import torch.distributed as dist

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import BalancePolicy
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import on_every_rank


def make_exchange_group(
    policy: BalancePolicy, info: RankInfo, ranks_per_node: int
) -> dist.ProcessGroup | None:
    """The group in which a policy exchanges samples; None where it exchanges with nobody.

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
    """Raise ConfigError where a field's value works within nodes that consecutive ranks are not.

    Every rank must call it: what one of them finds is raised on all.
    """
    if value in ("exchange_local", "shard_node"):
        on_every_rank(info, lambda: _check_node(field, value, info, ranks_per_node))


def _check_node(field: str, value: str, info: RankInfo, ranks_per_node: int) -> None:
    first = info.node_rank * ranks_per_node
    if info.local_world_size != ranks_per_node or info.rank != first + info.local_rank:
        raise ConfigError(
            field,
            f"{value!r} wants nodes of {ranks_per_node} consecutive ranks, rank {info.rank} "
            f"is number {info.local_rank} of {info.local_world_size} on node {info.node_rank}",
            "set parallel.ranks_per_node to the ranks of a machine and place them node by node",
        )
