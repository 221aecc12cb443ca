"""Describes simulated machines: their data sheets, the simulator's constants, and collectives.

The times of collectives follow the usual alpha-beta model, in which a message of n bytes over a
link takes alpha + n / bandwidth. The ring all-reduce follows Patarasuk and Yuan (Bandwidth
optimal all-reduce algorithms, 2009). The tree all-reduce is NCCL's, which sends half of the bytes
over each of two complementary trees (Sanders, Speck and Traeff, 2009). Times are in ms.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Literal, get_args

from bert_tools.plan.recipes import shipped_rows

AcceleratorName = Literal["a100", "a100_40gb", "h100", "h200", "b200", "gb200"]
ACCELERATORS: tuple[AcceleratorName, ...] = get_args(AcceleratorName)
MatrixPrecision = Literal["bf16", "fp8", "fp32"]

_USUAL_NODE = 8  # accelerators of the node to which `nics` in the table refers


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """An accelerator and the network of its usual node, as given by a row of `accelerators.csv`.

    `memory_gib` is the accelerator's memory in GiB. Rates are peak rates: TFLOP/s of dense matrix
    products, and GB/s (10^9 bytes per second) in one direction.
    """

    name: AcceleratorName
    matrix_16bit_tflops: float
    matrix_fp8_tflops: float
    matrix_fp32_tflops: float
    multiprocessors: int
    memory_gb_s: float
    memory_gib: int
    link_gb_s: float
    link_gpus: int
    nics: int
    nic_gb_s: float
    published_as: str
    source: str

    def peak_tflops(self, precision: MatrixPrecision) -> float:
        """Return the peak TFLOP/s of matrix products, or 0 if the precision is not supported."""
        if precision == "fp8":
            return self.matrix_fp8_tflops
        return self.matrix_fp32_tflops if precision == "fp32" else self.matrix_16bit_tflops


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A cluster of identical nodes with accelerators.

    `node_gb_s` is the line rate of a node's network ports in GB/s, in one direction.
    """

    accelerator: Accelerator
    nodes: int
    gpus_per_node: int
    node_gb_s: float

    @property
    def world_size(self) -> int:
        """Return the number of ranks, one per accelerator."""
        return self.nodes * self.gpus_per_node

    def by_links(self) -> "Machine":
        """Return the machine as a collective sees it, with one node for each group of links.

        The links of GB200 connect up to 18 nodes of four GPUs in a rack. The nodes fill as few
        racks as possible, and all racks equally, so that the last one may get a few ranks more than
        there are: 37 nodes become three racks of 50 GPUs.
        """
        reach = self.accelerator.link_gpus
        if reach <= _USUAL_NODE:  # links end at a node, even if it has fewer GPUs
            return self
        racks = math.ceil(self.world_size / reach)
        return replace(
            self,
            nodes=racks,
            gpus_per_node=math.ceil(self.world_size / racks),
            node_gb_s=self.node_gb_s * self.nodes / racks,
        )


@cache
def accelerators() -> dict[AcceleratorName, Accelerator]:
    """Read `accelerators.csv` and return its accelerators by name."""
    rows = shipped_rows("cluster/accelerators.csv", Accelerator)
    return {row.name: row for row in rows}


def make_machine(
    name: AcceleratorName, nodes: int, gpus_per_node: int, node_gb_s: float | None = None
) -> Machine:
    """Return a machine with `nodes` nodes.

    If `node_gb_s` is None, each node has the usual network ports for its number of GPUs.
    """
    accelerator = accelerators()[name]
    if node_gb_s is None:
        share = min(1.0, gpus_per_node / _USUAL_NODE)
        node_gb_s = accelerator.nics * accelerator.nic_gb_s * share
    return Machine(
        accelerator=accelerator, nodes=nodes, gpus_per_node=gpus_per_node, node_gb_s=node_gb_s
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """The constants of the simulator. `constants.csv` lists their units, bounds and sources."""

    matrix_efficiency: float
    kernel_overhead_us: float
    host_launch_us: float
    network_efficiency: float
    jitter_fraction: float
    memory_efficiency: float
    attention_efficiency: float
    link_efficiency: float
    link_latency_us: float
    network_latency_us: float
    collective_start_us: float
    overlap_slowdown: float
    sync_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantRow:
    """A constant of the simulator with its value, its bounds and its source."""

    name: str
    value: float
    low: float
    high: float
    kind: Literal["fitted", "assumed"]
    unit: str
    source: str


@cache
def constant_rows() -> tuple[ConstantRow, ...]:
    """Return the rows of `constants.csv` in the order of the file."""
    return shipped_rows("cluster/constants.csv", ConstantRow)


def default_constants() -> Constants:
    """Return the constants with their values from `constants.csv`."""
    values = {row.name: row.value for row in constant_rows()}
    assert set(values) == {field.name for field in fields(Constants)}
    return Constants(**values)


def ring_all_reduce_ms(num_bytes: float, ranks: int, gb_s: float, latency_us: float) -> float:
    """Return the time of a ring all-reduce in ms.

    Each of p ranks sends 2 (p - 1) messages in sequence, each with 1/p of the bytes.
    """
    return 2 * ring_all_gather_ms(num_bytes, ranks, gb_s, latency_us)


def ring_all_gather_ms(num_bytes: float, ranks: int, gb_s: float, latency_us: float) -> float:
    """Return the time of a ring all-gather in ms.

    Each of p ranks sends p - 1 messages in sequence, each with 1/p of `num_bytes`. A reduce-scatter
    takes the same time.
    """
    return (ranks - 1) * (num_bytes / ranks / gb_s / 1e6 + latency_us / 1e3)


def tree_all_reduce_ms(num_bytes: float, ranks: int, gb_s: float, latency_us: float) -> float:
    """Return the time of an all-reduce over two complementary trees, in ms.

    Every byte goes up and down a tree, so it enters and leaves a rank twice.
    """
    if ranks == 1:
        return 0.0
    return 2 * num_bytes / gb_s / 1e6 + 2 * math.ceil(math.log2(ranks)) * latency_us / 1e3


@dataclass(frozen=True, slots=True)
class Network:
    """A model of the times of collectives over the ranks of a machine.

    An all-reduce uses the fastest of the modeled algorithms.
    """

    machine: Machine
    constants: Constants

    @property
    def link_gb_s(self) -> float:
        """Return the achieved bandwidth of a rank inside its node in GB/s, in one direction."""
        return self.machine.accelerator.link_gb_s * self.constants.link_efficiency

    @property
    def node_gb_s(self) -> float:
        """Return the achieved network bandwidth of a node in GB/s, in one direction."""
        return self.machine.by_links().node_gb_s * self.constants.network_efficiency

    def all_reduce_ms(self, num_bytes: float) -> float:
        """Return the time in ms of an all-reduce of a buffer of `num_bytes`, or 0 for one rank."""
        if self.machine.world_size == 1:
            return 0.0
        return self.constants.collective_start_us / 1e3 + min(self.all_reduce_times(num_bytes))

    def reduce_scatter_ms(self, num_bytes: float) -> float:
        """Return the time of a reduce-scatter in ms, which is half the time of an all-reduce."""
        return self.all_reduce_ms(num_bytes) / 2

    def all_reduce_times(self, num_bytes: float) -> list[float]:
        """Return the time of an all-reduce of `num_bytes` with each algorithm, in ms.

        The algorithms are a ring over all ranks, rings between nodes, and trees between nodes. On
        one node, only the ring is used.
        """
        machine, constants = self.machine.by_links(), self.constants
        link_us, network_us = constants.link_latency_us, constants.network_latency_us
        nodes, ranks = machine.nodes, machine.gpus_per_node
        if nodes == 1:
            return [ring_all_reduce_ms(num_bytes, ranks, self.link_gb_s, link_us)]
        # In a ring through all ranks, one hop per node crosses the network.
        hop_us = (link_us * (ranks - 1) + network_us) / ranks
        narrowest = min(self.link_gb_s, self.node_gb_s)
        inside = ring_all_reduce_ms(num_bytes, ranks, self.link_gb_s, link_us)
        return [
            ring_all_reduce_ms(num_bytes, machine.world_size, narrowest, hop_us),
            inside + ring_all_reduce_ms(num_bytes, nodes, self.node_gb_s, network_us),
            # The chain inside a node and the tree between nodes work as one pipeline.
            tree_all_reduce_ms(num_bytes, nodes, narrowest, network_us)
            + 2 * (ranks - 1) * link_us / 1e3,
        ]

    def all_gather_in_node_ms(self, num_bytes: float) -> float:
        """Return the time in ms of an all-gather in each node, whose result has `num_bytes`."""
        ranks = self.machine.gpus_per_node
        if ranks == 1:
            return 0.0
        return self.constants.collective_start_us / 1e3 + self._gather_by_links_ms(num_bytes, ranks)

    def _gather_by_links_ms(self, num_bytes: float, ranks: int) -> float:
        return ring_all_gather_ms(num_bytes, ranks, self.link_gb_s, self.constants.link_latency_us)

    def all_gather_ms(self, num_bytes: float) -> float:
        """Return the time in ms of an all-gather over all ranks, between nodes and then in them."""
        if self.machine.world_size == 1:
            return 0.0
        machine = self.machine.by_links()
        inside = self._gather_by_links_ms(num_bytes, machine.gpus_per_node)
        inside += self.constants.collective_start_us / 1e3
        if machine.nodes == 1:
            return inside
        nodes, network_us = machine.nodes, self.constants.network_latency_us
        between = num_bytes * (nodes - 1) / nodes / self.node_gb_s / 1e6
        # Recursive doubling with log2(n) messages is used if a ring would have a longer latency.
        latency_ms = min(nodes - 1, math.ceil(math.log2(nodes))) * network_us / 1e3
        return inside + between + latency_ms


Scope = Literal["none", "node", "world"]
StepOptimizer = Literal["adam", "lamb"]
