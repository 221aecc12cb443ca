"""Machines that are simulated: peak rates from data sheets, nodes, and what a link achieves."""

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, get_args

AcceleratorName = Literal["a100", "a100_40gb", "h100", "h200"]
ACCELERATORS: tuple[AcceleratorName, ...] = get_args(AcceleratorName)
MatrixPrecision = Literal["bf16", "fp16", "fp8", "fp32"]

_USUAL_NODE = 8  # accelerators of the node that `nics` of the table speaks of


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
        """Of matrix products; 0 where there are no such units."""
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
    text = resources.files(__package__).joinpath("accelerators.csv").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    rows = {row["name"]: row for row in csv.DictReader(lines)}
    return {
        name: Accelerator(
            name=name,
            matrix_16bit_tflops=float(row["matrix_16bit_tflops"]),
            matrix_fp8_tflops=float(row["matrix_fp8_tflops"]),
            matrix_fp32_tflops=float(row["matrix_fp32_tflops"]),
            multiprocessors=int(row["multiprocessors"]),
            memory_gb_s=float(row["memory_gb_s"]),
            link_gb_s=float(row["link_gb_s"]),
            nics=int(row["nics"]),
            nic_gb_s=float(row["nic_gb_s"]),
            source=row["source"],
        )
        for name in ACCELERATORS
        for row in [rows[name]]
    }


def make_machine(
    name: AcceleratorName, nodes: int, gpus_per_node: int, node_gb_s: float | None = None
) -> Machine:
    """A machine; without `node_gb_s` its nodes have the usual ports, in proportion."""
    accelerator = accelerators()[name]
    if node_gb_s is None:
        share = min(1.0, gpus_per_node / _USUAL_NODE)
        node_gb_s = accelerator.nics * accelerator.nic_gb_s * share
    return Machine(
        accelerator=accelerator, nodes=nodes, gpus_per_node=gpus_per_node, node_gb_s=node_gb_s
    )
