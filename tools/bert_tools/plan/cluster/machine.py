"""Simulated machines: data sheets, constants beyond them, and collectives.

Times of collectives follow the usual alpha-beta model: a message of n bytes over a link takes
alpha + n / bandwidth. Ring: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009.
Trees: two complementary ones, each with half of the bytes (Sanders, Speck and Traeff, 2009), as
in NCCL. Times are ms.
"""

import math
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal, get_args

from bert_tools.plan.recipes import shipped_rows

AcceleratorName = Literal["a100", "a100_40gb", "h100", "h200"]
ACCELERATORS: tuple[AcceleratorName, ...] = get_args(AcceleratorName)
MatrixPrecision = Literal["bf16", "fp8", "fp32"]

_USUAL_NODE = 8  # accelerators of the node that the table's `nics` counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """One accelerator and the network of its usual node; a row of `accelerators.csv`.

    Rates are peaks: TFLOP/s of dense matrix products, GB/s (10^9 bytes a second) one direction.
    """

    name: AcceleratorName
    matrix_16bit_tflops: float
    matrix_fp8_tflops: float
    matrix_fp32_tflops: float
    multiprocessors: int
    memory_gb_s: float
    link_gb_s: float
    nics: int
    nic_gb_s: float
    source: str

    def peak_tflops(self, precision: MatrixPrecision) -> float:
        """Peak TFLOP/s of matrix products; 0 if there are no such units."""
        if precision == "fp8":
            return self.matrix_fp8_tflops
        return self.matrix_fp32_tflops if precision == "fp32" else self.matrix_16bit_tflops


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Nodes of equal accelerators. `node_gb_s` is the line rate out of a node, one direction."""

    accelerator: Accelerator
    nodes: int
    gpus_per_node: int
    node_gb_s: float

    @property
    def world_size(self) -> int:
        """Ranks, one an accelerator."""
        return self.nodes * self.gpus_per_node


@cache
def accelerators() -> dict[AcceleratorName, Accelerator]:
    """All accelerators of `accelerators.csv`, by name."""
    rows = shipped_rows("cluster/accelerators.csv", Accelerator)
    return {row.name: row for row in rows}


def make_machine(
    name: AcceleratorName, nodes: int, gpus_per_node: int, node_gb_s: float | None = None
) -> Machine:
    """Make a machine; without `node_gb_s` its nodes have ports in the usual proportion."""
    accelerator = accelerators()[name]
    if node_gb_s is None:
        share = min(1.0, gpus_per_node / _USUAL_NODE)
        node_gb_s = accelerator.nics * accelerator.nic_gb_s * share
    return Machine(
        accelerator=accelerator, nodes=nodes, gpus_per_node=gpus_per_node, node_gb_s=node_gb_s
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Values of `constants.csv`, which gives each one's unit, bounds and source."""

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
    """One constant: its value, the bounds it may take, and where it comes from."""

    name: str
    value: float
    low: float
    high: float
    kind: Literal["fitted", "assumed"]
    unit: str
    source: str


@cache
def constant_rows() -> tuple[ConstantRow, ...]:
    """All rows of `constants.csv`, in its order."""
    return shipped_rows("cluster/constants.csv", ConstantRow)


def default_constants() -> Constants:
    """The values of `constants.csv`."""
    values = {row.name: row.value for row in constant_rows()}
    assert set(values) == {field.name for field in fields(Constants)}
    return Constants(**values)


def ring_all_reduce_ms(num_bytes: float, ranks: int, gb_s: float, latency_us: float) -> float:
    """Time of 2 (p - 1) messages of a p-th of the bytes, one after the other."""
    return 2 * ring_all_gather_ms(num_bytes, ranks, gb_s, latency_us)


def ring_all_gather_ms(num_bytes: float, ranks: int, gb_s: float, latency_us: float) -> float:
    """Time of p - 1 messages of a p-th of `num_bytes`; a reduce-scatter takes as long."""
    return (ranks - 1) * (num_bytes / ranks / gb_s / 1e6 + latency_us / 1e3)


def tree_all_reduce_ms(num_bytes: float, ranks: int, gb_s: float, latency_us: float) -> float:
    """Time up and down two trees at once: every byte enters and leaves a rank twice."""
    if ranks == 1:
        return 0.0
    return 2 * num_bytes / gb_s / 1e6 + 2 * math.ceil(math.log2(ranks)) * latency_us / 1e3


@dataclass(frozen=True, slots=True)
class Network:
    """Collectives over the ranks of a machine; an all-reduce takes the quickest way."""

    machine: Machine
    constants: Constants

    @property
    def link_gb_s(self) -> float:
        """Achieved GB/s of one rank inside its node, one direction."""
        return self.machine.accelerator.link_gb_s * self.constants.link_efficiency

    @property
    def node_gb_s(self) -> float:
        """Achieved GB/s of one node, one direction."""
        return self.machine.node_gb_s * self.constants.network_efficiency

    def all_reduce_ms(self, num_bytes: float) -> float:
        """Time to all-reduce a buffer that every rank has whole; 0 for one rank."""
        if self.machine.world_size == 1:
            return 0.0
        return self.constants.collective_start_us / 1e3 + min(self.all_reduce_ways(num_bytes))

    def reduce_scatter_ms(self, num_bytes: float) -> float:
        """Time until each rank has its part of the sum: the first half of an all-reduce."""
        return self.all_reduce_ms(num_bytes) / 2

    def all_reduce_ways(self, num_bytes: float) -> list[float]:
        """Times of a ring over all ranks, then of rings or trees between nodes."""
        machine, constants = self.machine, self.constants
        link_us, network_us = constants.link_latency_us, constants.network_latency_us
        nodes, ranks = machine.nodes, machine.gpus_per_node
        if nodes == 1:
            return [ring_all_reduce_ms(num_bytes, ranks, self.link_gb_s, link_us)]
        # A ring through all ranks: one hop per node crosses the network.
        hop_us = (link_us * (ranks - 1) + network_us) / ranks
        narrowest = min(self.link_gb_s, self.node_gb_s)
        inside = ring_all_reduce_ms(num_bytes, ranks, self.link_gb_s, link_us)
        return [
            ring_all_reduce_ms(num_bytes, machine.world_size, narrowest, hop_us),
            inside + ring_all_reduce_ms(num_bytes, nodes, self.node_gb_s, network_us),
            # The chain inside a node and the tree between nodes are one pipeline.
            tree_all_reduce_ms(num_bytes, nodes, narrowest, network_us)
            + 2 * (ranks - 1) * link_us / 1e3,
        ]

    def all_gather_in_node_ms(self, num_bytes: float) -> float:
        """Time to gather inside a node; `num_bytes` is the whole that every rank then has."""
        ranks = self.machine.gpus_per_node
        if ranks == 1:
            return 0.0
        start_ms = self.constants.collective_start_us / 1e3
        link_us = self.constants.link_latency_us
        return start_ms + ring_all_gather_ms(num_bytes, ranks, self.link_gb_s, link_us)

    def all_gather_ms(self, num_bytes: float) -> float:
        """Time to gather over all ranks: first between nodes, then inside them."""
        if self.machine.nodes == 1:
            return self.all_gather_in_node_ms(num_bytes)
        start_ms = self.constants.collective_start_us / 1e3
        nodes, network_us = self.machine.nodes, self.constants.network_latency_us
        inside = ring_all_gather_ms(
            num_bytes, self.machine.gpus_per_node, self.link_gb_s, self.constants.link_latency_us
        )
        between = num_bytes * (nodes - 1) / nodes / self.node_gb_s / 1e6
        # Recursive doubling, log2(n) messages, where a ring's latency would be longer.
        latency_ms = min(nodes - 1, math.ceil(math.log2(nodes))) * network_us / 1e3
        return start_ms + inside + between + latency_ms


Scope = Literal["none", "node", "world"]
StepOptimizer = Literal["adam", "lamb"]
