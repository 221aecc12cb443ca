"""What the simulated program does: layout, kernels, host syncs, sharding; ours and published ones.

Kernels of a layer are counted by inventory. Forward: product for queries, keys and values,
attention, product, dropout and sum, LayerNorm, two products, GELU, dropout and sum, LayerNorm.
Backward: both gradients and the bias's of every product, two kernels for each LayerNorm, dropout
and attention, GELU, sums. A fusion takes away the kernels that it joins. Activations are counted
in widths of the hidden size that are read or written, in the same way.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

# unpadded: real tokens. capacity: real tokens, padded to what the step's largest forward has.
# padded_rows: a row of 512 for every sequence. packed_rows: rows of 512 with two sequences.
Layout = Literal["unpadded", "capacity", "padded_rows", "packed_rows"]
# tile: a sequence's own length in tiles. class: rounded up to 128. longest: that of the longest.
AttentionLayout = Literal["tile", "class", "longest"]
Sharding = Literal["none", "node", "world"]
StepOptimizer = Literal["adam", "lamb"]
SoftwareName = Literal[
    "ours",
    "nvidia_v1_1",
    "nvidia_v1_1_captured",
    "nvidia_v2_0",
    "nvidia_v2_0_captured",
    "nvidia_v3_0_captured",
    "samsung_v1_1",
    "samsung_v2_0",
    "hazyresearch",
    "baidu",
]
SOFTWARE_NAMES: tuple[SoftwareName, ...] = get_args(SoftwareName)


_LAMB_BYTES_MORE = 14  # update written and read, weight read again (fp32); gradient read for a norm


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """One program. Counts are of a forward and backward pass; bytes of a parameter and update."""

    layout: Layout
    capture: Literal["on", "off"]
    attention: AttentionLayout
    head_rows: Literal["masked", "all"]
    last_layer_rows: Literal["masked", "all"]
    forward_kernels: int  # of a layer
    backward_kernels: int  # of a layer
    other_kernels: int  # embeddings, heads, loss
    forward_widths: float  # hidden-size widths read and written a token and layer
    backward_widths: float
    optimizer: StepOptimizer
    optimizer_kernels: int
    zeroing_kernels: int  # of gradients, behind the update
    optimizer_bytes: float  # read and written for each parameter
    sharding: Sharding
    syncs_in_input: int
    input_launches: int  # of exchanging samples on the device
    sync_before_update: Literal["on", "off"]  # the host reads whether a gradient overflowed
    syncs_in_hooks: Literal["none", "each bucket"]
    hook_kernels: int  # launches for each bucket
    in_network_reduction: Literal["on", "off"]


_NVIDIA = Software(
    layout="unpadded",
    capture="off",
    attention="longest",
    head_rows="masked",
    last_layer_rows="all",
    forward_kernels=9,
    backward_kernels=24,
    other_kernels=120,
    forward_widths=11,
    backward_widths=38,
    optimizer="lamb",
    optimizer_kernels=40,
    zeroing_kernels=1,
    optimizer_bytes=42,
    sharding="node",
    syncs_in_input=3,
    input_launches=40,
    sync_before_update="off",
    syncs_in_hooks="none",
    hook_kernels=0,
    in_network_reduction="off",
)
_NVIDIA_V1_1 = replace(_NVIDIA, forward_kernels=10, backward_kernels=25, forward_widths=19)
_SAMSUNG = replace(
    _NVIDIA_V1_1,
    optimizer="adam",
    optimizer_kernels=120,
    zeroing_kernels=393,  # views of DDP's buckets are zeroed, one kernel a parameter
    optimizer_bytes=38,  # unscaling into fp32 gradients first, then apex FusedAdam
    sharding="none",
    sync_before_update="on",
    syncs_in_hooks="each bucket",
    hook_kernels=8,
)

_SOFTWARE: dict[SoftwareName, Software] = {
    "ours": Software(
        layout="capacity",
        capture="on",
        attention="tile",
        head_rows="masked",
        last_layer_rows="masked",
        forward_kernels=7,  # dropout, sum and LayerNorm are one kernel
        backward_kernels=22,
        other_kernels=120,
        forward_widths=15,
        backward_widths=34,
        optimizer="adam",
        optimizer_kernels=4,
        zeroing_kernels=1,
        optimizer_bytes=28,
        sharding="none",
        syncs_in_input=0,
        input_launches=0,
        sync_before_update="off",
        syncs_in_hooks="none",
        hook_kernels=4,
        in_network_reduction="off",
    ),
    "nvidia_v1_1": _NVIDIA_V1_1,
    "nvidia_v1_1_captured": replace(
        _NVIDIA_V1_1, layout="padded_rows", capture="on", head_rows="all", input_launches=0
    ),
    "nvidia_v2_0": _NVIDIA,
    "nvidia_v2_0_captured": replace(
        _NVIDIA_V1_1, layout="packed_rows", capture="on", head_rows="all", input_launches=0
    ),
    # Heads over masked positions only, outside of the graph.
    "nvidia_v3_0_captured": replace(_NVIDIA, layout="packed_rows", capture="on", input_launches=0),
    # Biases, dropouts and sums are kernels of their own.
    "samsung_v1_1": replace(
        _SAMSUNG, forward_kernels=16, backward_kernels=31, forward_widths=30, backward_widths=44
    ),
    "samsung_v2_0": _SAMSUNG,
    "hazyresearch": replace(
        _NVIDIA,
        attention="tile",
        last_layer_rows="masked",
        forward_kernels=7,
        backward_kernels=20,
        backward_widths=32,
    ),
    "baidu": replace(
        _NVIDIA,
        attention="class",
        forward_kernels=8,
        backward_kernels=22,
        backward_widths=34,
        syncs_in_input=0,
        input_launches=0,
    ),
}


def software(name: SoftwareName) -> Software:
    """The program of this name."""
    return _SOFTWARE[name]


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
