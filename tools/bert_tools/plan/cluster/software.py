"""What the simulated program does: layout, kernels, host syncs, sharding."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from bert_tools.plan.shipped import shipped_rows

Layout = Literal["unpadded", "capacity", "padded_rows", "packed_rows"]
AttentionLayout = Literal["tile", "class", "longest"]
Scope = Literal["none", "node", "world"]
StepOptimizer = Literal["adam", "lamb"]

_LAMB_BYTES_MORE = 14  # update written and read, weight read again (fp32); gradient read for a norm


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """One program, a row of `software.csv`, which says what the fields count."""

    name: str
    layout: Layout
    capture: Literal["on", "off"]
    attention: AttentionLayout
    head_rows: Literal["masked", "all"]
    last_layer_rows: Literal["masked", "all"]
    forward_kernels: int
    backward_kernels: int
    other_kernels: int
    forward_widths: float
    backward_widths: float
    optimizer: StepOptimizer
    optimizer_kernels: int
    zeroing_kernels: int
    optimizer_bytes: float
    sharding: Scope
    syncs_in_input: int
    input_launches: int
    sync_before_update: Literal["on", "off"]
    syncs_in_hooks: Literal["none", "each bucket"]
    hook_kernels: int
    in_network_reduction: Literal["on", "off"]


@cache
def programs() -> dict[str, Software]:
    """All of `software.csv`, by name."""
    return {row.name: row for row in shipped_rows("cluster/software.csv", Software)}


def with_capture(program: Software, capture: Literal["on", "off"]) -> Software:
    """The same, captured or launched kernel by kernel.

    A captured step cannot ask the device anything, and its batches are padded to a capacity.
    """
    if capture == "off":
        layout = "unpadded" if program.layout == "capacity" else program.layout
        return replace(program, capture=capture, layout=layout)
    return replace(
        program,
        capture=capture,
        layout="capacity" if program.layout == "unpadded" else program.layout,
        syncs_in_hooks="none",
        sync_before_update="off",
    )


def with_optimizer(program: Software, optimizer: StepOptimizer) -> Software:
    """The same with LAMB, which reads and writes its update once more than Adam, or with Adam."""
    if optimizer == program.optimizer:
        return program
    more = _LAMB_BYTES_MORE if optimizer == "lamb" else -_LAMB_BYTES_MORE
    return replace(program, optimizer=optimizer, optimizer_bytes=program.optimizer_bytes + more)
