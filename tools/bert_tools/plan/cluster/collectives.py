"""Time of a collective by its latency and bandwidth: ring, tree, hierarchical, in the network.

The usual alpha-beta model: a message of n bytes over a link takes alpha + n / bandwidth. Ring:
Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009. Trees: two complementary ones,
each with half of the bytes (Sanders, Speck and Traeff, 2009), as NCCL has them. Times are ms.
"""

import math
from dataclasses import dataclass

from bert_tools.plan.cluster.constants import Constants
from bert_tools.plan.cluster.machine import Machine


def ring_all_reduce_ms(num_bytes: float, ranks: int, gb_s: float, latency_us: float) -> float:
    """2 (p - 1) messages of a p-th of the bytes, one after the other."""
    return 2 * ring_all_gather_ms(num_bytes, ranks, gb_s, latency_us)


def ring_all_gather_ms(num_bytes: float, ranks: int, gb_s: float, latency_us: float) -> float:
    """p - 1 messages of a p-th; a reduce-scatter takes as long. `num_bytes` is of the whole."""
    return (ranks - 1) * (num_bytes / ranks / gb_s / 1e6 + latency_us / 1e3)


def tree_all_reduce_ms(num_bytes: float, ranks: int, gb_s: float, latency_us: float) -> float:
    """Up and down two trees at once: every byte enters and leaves a rank twice."""
    if ranks == 1:
        return 0.0
    return 2 * num_bytes / gb_s / 1e6 + 2 * math.ceil(math.log2(ranks)) * latency_us / 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Collectives over the ranks of a machine; an all-reduce by the way that is the quickest."""

    machine: Machine
    constants: Constants
    in_network_reduction: bool = False

    @property
    def link_gb_s(self) -> float:
        """Achieved by one rank inside its node, one direction."""
        return self.machine.accelerator.link_gb_s * self.constants.link_efficiency

    @property
    def node_gb_s(self) -> float:
        """Achieved by one node, one direction."""
        return self.machine.node_gb_s * self.constants.network_efficiency

    def all_reduce_ms(self, num_bytes: float) -> float:
        """Of a buffer that every rank has whole. Nothing for one rank."""
        if self.machine.world_size == 1:
            return 0.0
        return self.constants.collective_start_us / 1e3 + min(self.all_reduce_ways(num_bytes))

    def all_reduce_ways(self, num_bytes: float) -> list[float]:
        """Ring over all ranks, then hierarchical ones: ring or tree or switches between nodes."""
        machine, constants = self.machine, self.constants
        link_us, network_us = constants.link_latency_us, constants.network_latency_us
        nodes, ranks = machine.nodes, machine.gpus_per_node
        if nodes == 1:
            return [ring_all_reduce_ms(num_bytes, ranks, self.link_gb_s, link_us)]
        # A ring through all ranks: of its hops, one a node crosses the network.
        hop_us = (link_us * (ranks - 1) + network_us) / ranks
        narrowest = min(self.link_gb_s, self.node_gb_s)
        inside = ring_all_reduce_ms(num_bytes, ranks, self.link_gb_s, link_us)
        ways = [
            ring_all_reduce_ms(num_bytes, machine.world_size, narrowest, hop_us),
            inside + ring_all_reduce_ms(num_bytes, nodes, self.node_gb_s, network_us),
            # The chain inside a node and the tree between nodes are one pipeline.
            tree_all_reduce_ms(num_bytes, nodes, narrowest, network_us)
            + 2 * (ranks - 1) * link_us / 1e3,
        ]
        if self.in_network_reduction:
            once = num_bytes / narrowest / 1e6
            ways.append(once + 2 * (network_us + (ranks - 1) * link_us) / 1e3)
        return ways

    def all_gather_in_node_ms(self, num_bytes: float) -> float:
        """`num_bytes` is of the whole that every rank then has."""
        ranks = self.machine.gpus_per_node
        if ranks == 1:
            return 0.0
        start_ms = self.constants.collective_start_us / 1e3
        link_us = self.constants.link_latency_us
        return start_ms + ring_all_gather_ms(num_bytes, ranks, self.link_gb_s, link_us)

    def all_gather_ms(self, num_bytes: float) -> float:
        """Over all ranks: between nodes, then inside them, one after the other."""
        if self.machine.nodes == 1:
            return self.all_gather_in_node_ms(num_bytes)
        start_ms = self.constants.collective_start_us / 1e3
        nodes, network_us = self.machine.nodes, self.constants.network_latency_us
        inside = ring_all_gather_ms(
            num_bytes, self.machine.gpus_per_node, self.link_gb_s, self.constants.link_latency_us
        )
        between = num_bytes * (nodes - 1) / nodes / self.node_gb_s / 1e6
        # Recursive doubling where a ring's latency would be the longer: log2(n) messages.
        latency_ms = min(nodes - 1, math.ceil(math.log2(nodes))) * network_us / 1e3
        return start_ms + inside + between + latency_ms
