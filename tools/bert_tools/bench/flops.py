"""The floating-point operations of a training step, and the measured peak rate of this machine.

The operations of a step are counted as in publications. MFU (model FLOPs utilization) is the rate
of these operations in training, divided by the peak rate. The peak rate is the rate of matrix
products on the same machine. This module measures it with the two products of the model's
feed-forward layer, on as many rows as a batch has tokens. The measurement should last until the
processor's clocks slow down, as they do in training.

A multiply-add counts as 2 operations, and the backward pass as twice the forward pass. Only matrix
products count, not normalization, softmax, rotary positions, dropout or the update. In layers with
a window, only the pairs of tokens within the window count, even if an implementation computes more.

Shape letters: T tokens, L length of a sequence, D hidden, F feed-forward width, V vocabulary
(padded), P masked positions, B sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.model.bert import COMPUTED_IN

PER_MULTIPLY_ADD = 2
PASSES = 3  # forward, gradients of the inputs, gradients of the weights
ROW_MULTIPLE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Numbers of floating-point operations in a forward and backward pass, by part of the model."""

    encoder: float  # products with weights
    attention: float  # scores, and values weighted by them
    head: float  # logits of masked words
    pooler: float  # pooler and next-sentence head

    @property
    def total(self) -> float:
        """Total number of operations, over all parts of the model."""
        return self.encoder + self.attention + self.head + self.pooler


def model_flops(
    model: ModelSection, lengths: Sequence[float], masked_counts: Sequence[float]
) -> Flops:
    """Count the floating-point operations of one training pass over sequences of these lengths.

    As in publications, every layer counts for all tokens, even if the last layer computes fewer of
    them, and padding does not count. The count divided by the time and by the machine's peak rate
    is the model FLOPs utilization, MFU (arXiv 2204.02311, appendix B).

    Args:
        model: the settings of the model.
        lengths: number of tokens of each sequence.
        masked_counts: number of masked positions of each sequence.
    """
    hidden, factor = model.hidden_size, PER_MULTIPLY_ADD * PASSES
    num_pairs = len(lengths) if model.objective == "mlm_nsp" else 0
    return Flops(
        encoder=factor * model.num_layers * _layer_products(model) * sum(lengths),
        attention=factor * 2 * hidden * _attended(model, lengths),
        head=factor * (hidden**2 + hidden * model.padded_vocab_size) * sum(masked_counts),
        pooler=factor * (hidden**2 + 2 * hidden) * num_pairs,
    )


def _attended(model: ModelSection, lengths: Sequence[float]) -> float:
    """Count the pairs of tokens that attend to each other, summed over all layers."""
    num_global = sum(map(model.is_global, range(model.num_layers)))
    seen = num_global * sum(length**2 for length in lengths)
    if num_global == model.num_layers:
        return seen
    # The sum over i < L of min(i, reach) + 1 + min(L - 1 - i, reach).
    all_lengths = np.asarray(lengths, dtype=np.float64)
    far = np.minimum(model.reach, all_lengths - 1)
    of_sequences = all_lengths + far * (2 * all_lengths - 1 - far)
    return seen + (model.num_layers - num_global) * float(of_sequences.sum())


def _layer_products(model: ModelSection) -> int:
    """Count the multiply-adds that one layer's weights need per token.

    With hidden size D and feed-forward width F, this is 4 D^2 + 2 D F, or 4 D^2 + 3 D F with gates.
    """
    matrices = 3 if model.architecture == "modern" else 2
    return 4 * model.hidden_size**2 + matrices * model.hidden_size * model.intermediate_size


def peak_dtype(model: ModelSection) -> torch.dtype:
    """Return the dtype of the inputs of the model's matrix products."""
    return torch.float8_e4m3fn if model.precision == "fp8" else COMPUTED_IN[model.precision]


def measure_peak(
    model: ModelSection, num_tokens: int, device: torch.device, seconds: float
) -> tuple[float | None, str | None]:
    """Measure how fast the device computes the matrix products of the feed-forward layer.

    The measurement takes about `seconds` seconds and uses matrices of `num_tokens` rows. Returns
    TFLOP/s and None, or None and the reason if the device cannot compute such products.
    """
    rows = -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
    sizes = model.hidden_size, model.intermediate_size
    try:
        products = _products(rows, *sizes, peak_dtype(model), device)
        timer = Timer(
            "products()", globals={"products": products}, num_threads=torch.get_num_threads()
        )
        once = timer.timeit(1).mean
        taken = timer.timeit(max(1, round(seconds / once))).mean
    except (RuntimeError, NotImplementedError) as error:
        return None, str(error).splitlines()[0]
    # Each call computes two products.
    return 2 * PER_MULTIPLY_ADD * rows * sizes[0] * sizes[1] / 1e12 / taken, None


def _products(
    rows: int, hidden: int, wide: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """Return a function that computes both matrix products of the feed-forward layer once."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    pairs = (
        (random(rows, hidden), random(wide, hidden)),
        (random(rows, wide), random(hidden, wide)),
    )
    one = torch.ones((), device=device)

    def plain() -> None:
        for x, weight in pairs:
            F.linear(x, weight)

    def scaled() -> None:
        for x, weight in pairs:
            torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return scaled if dtype == torch.float8_e4m3fn else plain
