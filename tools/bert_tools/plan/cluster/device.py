"""Device time of the parts of a step: matrix products in waves of tiles, attention, memory.

Shape letters: R ranks, T tokens, D hidden, F feed-forward width, V vocabulary. Times are ms.
"""

from dataclasses import dataclass, replace

import numpy as np

from bert_tools.plan.cluster.constants import Constants
from bert_tools.plan.cluster.machine import Accelerator, MatrixPrecision
from bert_tools.plan.cluster.software import Software
from bert_tools.plan.cluster.workload import Float64Array, Workload
from mlperf_bert.config.sections import ModelSection

TILE = 128  # rows and columns of a tile of a product
_MOST_SPLITS = 16  # of the sum over tokens, in a product that gives a weight's gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Speeds of one accelerator with one program."""

    accelerator: Accelerator
    precision: MatrixPrecision
    constants: Constants

    @property
    def activation_bytes(self) -> int:
        """Of one activation in memory; those of fp8 stay in 16 bits between products."""
        return 4 if self.precision == "fp32" else 2

    def product_ms(self, rows: Float64Array, columns: int, inner: int) -> Float64Array:
        """A product [rows, inner] x [inner, columns], rows an array: whole waves of tiles.

        The heads, embeddings and gradients of weights are not quantised in `inner`.
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
        """Reading or writing so many bytes of device memory."""
        rate = 1e6 * self.accelerator.memory_gb_s * self.constants.memory_efficiency
        return np.asarray(num_bytes, dtype=np.float64) / rate

    def kernels_ms(self, count: float) -> float:
        """What kernels take beyond their work."""
        return count * self.constants.kernel_overhead_us / 1e3

    def _tile_ms(self, inner: int) -> float:
        rate = self._rate(self.constants.matrix_efficiency, self.precision)
        return 2 * TILE * TILE * inner * self.accelerator.multiprocessors / rate

    def _rate(self, efficiency: float, precision: MatrixPrecision) -> float:
        """Operations a millisecond."""
        if self.precision == "fp32":
            precision = "fp32"
        return 1e9 * self.accelerator.peak_tflops(precision) * efficiency


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """Device time of one encoder layer, ms, float64 [R]."""

    forward: Float64Array
    backward: Float64Array


def layer_work(
    device: Device, model: ModelSection, program: Software, work: Workload, rows: Float64Array
) -> LayerWork:
    """One layer over all tokens; `rows` of them go on behind attention, float64 [R].

    In the last layer these are the masked positions where the program leaves out the others.
    """
    hidden, wide = model.hidden_size, model.intermediate_size
    tokens = work.tokens
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
    share = rows / tokens
    attended = work.attended * share
    width_bytes = device.activation_bytes * hidden
    return LayerWork(
        forward=products
        + device.attention_ms(attended, hidden, 2)
        + device.memory_ms(program.forward_widths * width_bytes * (rows + tokens) / 2)
        + device.kernels_ms(program.forward_kernels),
        backward=gradients
        + device.attention_ms(attended, hidden, 5)
        + device.memory_ms(program.backward_widths * width_bytes * (rows + tokens) / 2)
        + device.kernels_ms(program.backward_kernels),
    )


def head_ms(device: Device, model: ModelSection, rows: Float64Array) -> tuple[Float64Array, ...]:
    """Forward and backward of the masked-LM head over `rows` positions, ms, float64 [R] each."""
    if device.precision == "fp8":  # in the encoder only
        device = replace(device, precision="bf16")
    hidden, vocabulary = model.hidden_size, model.padded_vocab_size
    forward = device.product_ms(rows, vocabulary, hidden) + device.product_ms(rows, hidden, hidden)
    backward = (
        device.product_ms(rows, hidden, vocabulary)
        + device.product_ms(rows, hidden, hidden)
        + device.weight_gradient_ms(rows, vocabulary, hidden)
        + device.weight_gradient_ms(rows, hidden, hidden)
    )
    logits = device.activation_bytes * vocabulary * rows
    return forward + device.memory_ms(2 * logits), backward + device.memory_ms(3 * logits)


def embedding_ms(
    device: Device, model: ModelSection, tokens: Float64Array
) -> tuple[Float64Array, ...]:
    """Forward and backward of the three tables with their LayerNorm, ms, float64 [R] each."""
    width = device.activation_bytes * model.hidden_size * tokens
    return device.memory_ms(8 * width), device.memory_ms(12 * width)
