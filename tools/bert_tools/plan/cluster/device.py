"""Device time of a step's phases: matrix products in waves of tiles, attention, memory.

A phase is the embeddings, one encoder layer or the heads, in one direction.

Shape letters: R ranks, T tokens, D hidden, F feed-forward width, V vocabulary. Times are ms.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from bert_tools.plan.buckets import backward_order
from bert_tools.plan.cluster.machine import Accelerator, Constants, MatrixPrecision
from bert_tools.plan.cluster.workload import Float64Array, Workload
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.distributed.bucket_plan import DEFAULT_CAP_MB, plan_buckets

MODEL = ModelSection()  # BERT-large
TILE = 128  # rows and columns of a tile of a product
_TYPICAL_TOKENS, _TYPICAL_MASKED = 256, 38  # Wikipedia's means; shares hardly depend on them
# Kernels of an encoder layer, by inventory; dropout, residual sum and LayerNorm are one. Others are
# those of embeddings, heads and loss. A hook launches its own for each bucket, about one a layer.
_FORWARD_KERNELS, _BACKWARD_KERNELS, _OTHER_KERNELS, _HOOK_KERNELS = 7, 22, 120, 4
# Widths of the hidden size read and written a token and layer.
_FORWARD_WIDTHS, _BACKWARD_WIDTHS = 15, 34
_MOST_SPLITS = 16  # splits of the sum over tokens in the product for a weight's gradient


@dataclass(frozen=True, slots=True)
class Device:
    """Speeds of one accelerator with one program."""

    accelerator: Accelerator
    precision: MatrixPrecision
    constants: Constants

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation in memory; fp8 keeps 16 bits between products."""
        return 4 if self.precision == "fp32" else 2

    def product_ms(self, rows: Float64Array, columns: int, inner: int) -> Float64Array:
        """A product [rows, inner] x [inner, columns], rows an array: whole waves of tiles.

        The heads, embeddings and weight gradients are not quantised in `inner`.
        """
        tiles = np.ceil(rows / TILE) * np.ceil(columns / TILE)
        waves = np.ceil(tiles / self.accelerator.multiprocessors)
        time: Float64Array = waves * self._tile_ms(inner)
        return time

    def weight_gradient_ms(self, tokens: Float64Array, columns: int, inner: int) -> Float64Array:
        """The gradient of a weight [columns, inner], a sum over tokens that may be split."""
        tiles = np.ceil(columns / TILE) * np.ceil(inner / TILE)
        splits = np.arange(1, _MOST_SPLITS + 1)
        waves = np.ceil(tiles * splits / self.accelerator.multiprocessors) / splits
        time: Float64Array = waves.min() * self._tile_ms(1) * tokens
        return time

    def attention_ms(self, attended: Float64Array, hidden: int, products: int) -> Float64Array:
        """Attention over pairs of query and key, with 2 * D operations a pair and product."""
        rate = self._rate(self.constants.attention_efficiency, "bf16")
        time: Float64Array = 2 * products * hidden * attended / rate
        return time

    def memory_ms(self, num_bytes: Float64Array | float) -> Float64Array:
        """Time to read or write so many bytes of device memory."""
        rate = 1e6 * self.accelerator.memory_gb_s * self.constants.memory_efficiency
        return np.asarray(num_bytes, dtype=np.float64) / rate

    def kernels_ms(self, count: float) -> float:
        """Time of kernels beyond their work."""
        return count * self.constants.kernel_overhead_us / 1e3

    def _tile_ms(self, inner: int) -> float:
        rate = self._rate(self.constants.matrix_efficiency, self.precision)
        return 2 * TILE * TILE * inner * self.accelerator.multiprocessors / rate

    def _rate(self, efficiency: float, precision: MatrixPrecision) -> float:
        """Operations per millisecond."""
        if self.precision == "fp32":
            precision = "fp32"
        return 1e9 * self.accelerator.peak_tflops(precision) * efficiency


def layer_ms(
    device: Device, work: Workload, rows: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Forward and backward of an encoder layer, ms, float64 [R] each.

    `rows` tokens, float64 [R], go on after attention: in the last layer the masked positions only.
    """
    hidden, wide, tokens = MODEL.hidden_size, MODEL.intermediate_size, work.tokens
    shapes = (
        (tokens, 3 * hidden, hidden),
        (rows, hidden, hidden),
        (rows, wide, hidden),
        (rows, hidden, wide),
    )
    products = np.zeros_like(tokens)
    gradients = np.zeros_like(tokens)
    for count, columns, inner in shapes:
        products = products + device.product_ms(count, columns, inner)
        gradients = gradients + device.product_ms(count, inner, columns)
        gradients = gradients + device.weight_gradient_ms(count, columns, inner)
    attended = work.attended * (rows / tokens)
    width_bytes = device.activation_bytes * hidden
    forward = products + device.attention_ms(attended, hidden, 2)
    forward += device.memory_ms(_FORWARD_WIDTHS * width_bytes * (rows + tokens) / 2)
    backward = gradients + device.attention_ms(attended, hidden, 5)
    backward += device.memory_ms(_BACKWARD_WIDTHS * width_bytes * (rows + tokens) / 2)
    return (
        forward + device.kernels_ms(_FORWARD_KERNELS),
        backward + device.kernels_ms(_BACKWARD_KERNELS),
    )


def head_ms(device: Device, rows: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Forward and backward of the masked-LM head over `rows` positions, ms, float64 [R] each."""
    if device.precision == "fp8":  # in the encoder only
        device = replace(device, precision="bf16")
    hidden, vocabulary = MODEL.hidden_size, MODEL.padded_vocab_size
    square = device.product_ms(rows, hidden, hidden)
    forward = device.product_ms(rows, vocabulary, hidden) + square
    backward = (
        device.product_ms(rows, hidden, vocabulary)
        + square
        + device.weight_gradient_ms(rows, vocabulary, hidden)
        + device.weight_gradient_ms(rows, hidden, hidden)
    )
    logits = device.activation_bytes * vocabulary * rows
    return forward + device.memory_ms(2 * logits), backward + device.memory_ms(3 * logits)


def embedding_ms(device: Device, tokens: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Forward and backward of the three tables with their LayerNorm, ms, float64 [R] each."""
    width = device.activation_bytes * MODEL.hidden_size * tokens
    return device.memory_ms(8 * width), device.memory_ms(12 * width)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of forward or backward: device time [R] in ms, and the host's work for it."""

    name: str
    direction: Literal["forward", "backward"]
    device_ms: Float64Array
    launches: int


@dataclass(frozen=True, slots=True)
class SentBucket:
    """A bucket of gradients, ready at `fraction` of the backward phase `phase`."""

    num_bytes: int
    phase: int
    fraction: float


def phases_of(device: Device, work: Workload) -> list[Phase]:
    """Phases of forward (embeddings, layers, heads) and of backward (heads, layers, embeddings)."""
    last_rows = np.minimum(work.masked + work.sequences, work.tokens)
    full = layer_ms(device, work, work.tokens)
    last = layer_ms(device, work, last_rows)
    heads, embeddings = head_ms(device, work.masked), embedding_ms(device, work.tokens)
    others = _OTHER_KERNELS // 4  # of embeddings and heads, forward and backward
    extra = device.kernels_ms(others)
    layers = [(f"layer {number}", full) for number in range(MODEL.num_layers - 1)]
    layers.append((f"layer {MODEL.num_layers - 1}", last))
    launches = _BACKWARD_KERNELS + _HOOK_KERNELS
    return [
        Phase("embeddings", "forward", embeddings[0] + extra, others),
        *(Phase(name, "forward", ms[0], _FORWARD_KERNELS) for name, ms in layers),
        Phase("heads", "forward", heads[0] + extra, others),
        Phase("heads", "backward", heads[1] + extra, others),
        *(Phase(name, "backward", ms[1], launches) for name, ms in layers[::-1]),
        Phase("embeddings", "backward", embeddings[1] + extra, others),
    ]


@cache
def sent_buckets(element_bytes: int, cap_mb: float = DEFAULT_CAP_MB) -> tuple[SentBucket, ...]:
    """DistributedDataParallel's buckets, each with the backward phase in which it is ready."""
    order = backward_order(MODEL, _TYPICAL_TOKENS, _TYPICAL_MASKED)
    phase_of = {gradient.name: _backward_phase(gradient.name) for gradient in order}
    ends = np.zeros(MODEL.num_layers + 2)
    for gradient in order:
        ends[phase_of[gradient.name]] = gradient.ready_at
    begins = np.concatenate([[0.0], ends[:-1]])
    buckets = []
    for bucket in plan_buckets(order, element_bytes, cap_mb):
        number = phase_of[bucket[-1].name]
        length = ends[number] - begins[number]
        fraction = (bucket[-1].ready_at - begins[number]) / length if length else 1.0
        num_bytes = element_bytes * sum(gradient.numel for gradient in bucket)
        buckets.append(SentBucket(num_bytes, number, float(fraction)))
    return tuple(buckets)


def _backward_phase(name: str) -> int:
    if name.startswith("bert.encoder.layer."):
        return MODEL.num_layers - int(name.split(".")[3])
    return MODEL.num_layers + 1 if name.startswith("bert.embeddings") else 0
