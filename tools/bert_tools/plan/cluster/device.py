"""Models the time that a device needs for the phases of a step.

A phase is the forward or the backward pass of the embeddings, one encoder layer or the heads. Its
time is the sum of the times of matrix products, attention and memory accesses. Matrix products run
in waves of tiles.

Shape letters: R ranks, T tokens, D hidden, F feed-forward width, V vocabulary. Times are in ms.
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
_TYPICAL_TOKENS, _TYPICAL_MASKED = 256, 38  # means of Wikipedia, which hardly affect the buckets
# Numbers of kernels. An encoder layer was counted with dropout, residual sum and LayerNorm as one
# kernel. The others are those of embeddings, heads and loss. A communication hook launches its own
# kernels for each bucket, and there is about one bucket per layer.
_FORWARD_KERNELS, _BACKWARD_KERNELS, _OTHER_KERNELS, _HOOK_KERNELS = 7, 22, 120, 4
# Activations of the hidden size that are read and written per token and layer.
_FORWARD_WIDTHS, _BACKWARD_WIDTHS = 15, 34
_MAX_SPLITS = 16  # maximum parts into which a weight gradient's sum over tokens is split


@dataclass(frozen=True, slots=True)
class Device:
    """The speed of one accelerator at one precision, as modeled with one set of constants."""

    accelerator: Accelerator
    precision: MatrixPrecision
    constants: Constants

    @property
    def activation_bytes(self) -> int:
        """Return the bytes per activation element, which are 4 for fp32 and 2 for bf16 and fp8."""
        return 4 if self.precision == "fp32" else 2

    def product_ms(self, rows: Float64Array, columns: int, inner: int) -> Float64Array:
        """Return each rank's time for a product [rows, inner] x [inner, columns], in ms, [R].

        The time is rounded up to whole waves of tiles. `rows`, [R], has one value per rank. `inner`
        is not rounded up to whole tiles.
        """
        tiles = np.ceil(rows / TILE) * np.ceil(columns / TILE)
        waves = np.ceil(tiles / self.accelerator.multiprocessors)
        time: Float64Array = waves * self._tile_ms(inner)
        return time

    def weight_gradient_ms(self, tokens: Float64Array, columns: int, inner: int) -> Float64Array:
        """Return each rank's time to compute a weight gradient [columns, inner], in ms, [R].

        The gradient is a sum over the rank's `tokens`, [R]. The sum may be split, so that more
        tiles can be computed at the same time.
        """
        tiles = np.ceil(columns / TILE) * np.ceil(inner / TILE)
        splits = np.arange(1, _MAX_SPLITS + 1)
        waves = np.ceil(tiles * splits / self.accelerator.multiprocessors) / splits
        time: Float64Array = waves.min() * self._tile_ms(1) * tokens
        return time

    def attention_ms(self, attended: Float64Array, hidden: int, products: int) -> Float64Array:
        """Return each rank's time for attention with `products` matrix products, in ms, [R].

        `attended`, [R], counts the pairs of query and key, and `hidden` is the number of channels.
        Each product needs 2 * `hidden` operations per pair.
        """
        rate = self._rate(self.constants.attention_efficiency, "bf16")
        time: Float64Array = 2 * products * hidden * attended / rate
        return time

    def memory_ms(self, num_bytes: Float64Array | float) -> Float64Array:
        """Return the time to read or write `num_bytes` of device memory, in ms."""
        rate = 1e6 * self.accelerator.memory_gb_s * self.constants.memory_efficiency
        return np.asarray(num_bytes, dtype=np.float64) / rate

    def kernels_ms(self, count: float) -> float:
        """Return the fixed overhead of `count` kernels in ms, without the time of their work."""
        return count * self.constants.kernel_overhead_us / 1e3

    def _tile_ms(self, inner: int) -> float:
        """Return the time in ms in which each multiprocessor computes one tile of `inner` terms."""
        rate = self._rate(self.constants.matrix_efficiency, self.precision)
        return 2 * TILE * TILE * inner * self.accelerator.multiprocessors / rate

    def _rate(self, efficiency: float, precision: MatrixPrecision) -> float:
        """Return the achieved operations per millisecond, that is the peak rate x `efficiency`."""
        if self.precision == "fp32":
            precision = "fp32"
        return 1e9 * self.accelerator.peak_tflops(precision) * efficiency


def layer_ms(
    device: Device, work: Workload, rows: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Return each rank's forward and backward time for an encoder layer in ms, float64 [R] each.

    `rows`, float64 [R], counts the token positions that the layer computes after attention. In the
    last layer, these are only the masked positions.
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
    """Return each rank's forward and backward time for the masked-LM head in ms, float64 [R] each.

    `rows`, float64 [R], counts the masked positions.
    """
    if device.precision == "fp8":  # fp8 is used only in the encoder
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
    """Return each rank's forward and backward time for the embeddings in ms, float64 [R] each.

    `tokens`, float64 [R], counts tokens. The embeddings are three tables and a LayerNorm.
    """
    width = device.activation_bytes * MODEL.hidden_size * tokens
    return device.memory_ms(8 * width), device.memory_ms(12 * width)


@dataclass(frozen=True, slots=True)
class Phase:
    """The forward or the backward pass of the embeddings, one encoder layer or the heads.

    `device_ms` is the phase's time on each rank's device in ms, [R]. `launches` is the number of
    kernels that the host launches for the phase.
    """

    name: str
    direction: Literal["forward", "backward"]
    device_ms: Float64Array
    launches: int


@dataclass(frozen=True, slots=True)
class SentBucket:
    """A bucket of gradients that are sent together.

    The bucket is ready when the fraction `fraction` of the backward phase number `phase` is done.
    """

    num_bytes: int
    phase: int
    fraction: float


def phases_of(device: Device, work: Workload) -> list[Phase]:
    """Return the phases of the forward pass, followed by the backward phases in reverse order."""
    last_rows = np.minimum(work.masked + work.sequences, work.tokens)
    full = layer_ms(device, work, work.tokens)
    last = layer_ms(device, work, last_rows)
    heads, embeddings = head_ms(device, work.masked), embedding_ms(device, work.tokens)
    others = _OTHER_KERNELS // 4  # the same for embeddings and heads, forward and backward
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
    """Return DistributedDataParallel's gradient buckets in the order in which they are sent."""
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
    """Return the number of the backward phase that computes a parameter's gradient."""
    if name.startswith("bert.encoder.layer."):
        return MODEL.num_layers - int(name.split(".")[3])
    return MODEL.num_layers + 1 if name.startswith("bert.embeddings") else 0
