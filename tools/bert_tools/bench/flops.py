"""Floating-point operations of a training step, and per second of this machine's matrix products.

Operations of a step are counted as in publications, and as our step does them. MFU is their share
of the machine's rate, which is measured on the spot: products of the model's feed-forward halves,
with as many rows as a batch has tokens, in a short burst and in a long run, in which clocks fall.

A multiply-add is 2 operations, and backward costs twice a forward. Only matrix products count:
normalisation, softmax, rotation, dropout and the update do not. In layers with windows a token
attends to what it sees, whatever a policy computes beside that.

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

from bert_tools.common.windows import attended_tokens
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.model.bert import COMPUTED_IN

PER_MULTIPLY_ADD = 2
PASSES = 3  # forward, gradients of the inputs, gradients of the weights
BURST_SECONDS = 0.2
LONG_SECONDS = 3.0
ROW_MULTIPLE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Operations of forward and backward, by part of the model."""

    encoder: float  # products with weights
    attention: float  # scores, and values weighted by them
    head: float  # logits of masked words
    pooler: float  # and the next-sentence head

    @property
    def total(self) -> float:
        """Operations of all parts."""
        return self.encoder + self.attention + self.head + self.pooler


def model_flops(
    model: ModelSection, lengths: Sequence[float], masked_counts: Sequence[float]
) -> Flops:
    """Operations for these sequences by the published convention: all layers whole, no padding.

    `masked_counts` are the masked positions of each. The result over time and over the machine's
    peak is MFU (model FLOPs utilisation, arXiv 2204.02311, appendix B).
    """
    layer = _layer_products(model)
    return _flops(
        model,
        encoder=model.num_layers * layer * sum(lengths),
        attended=_attended(model, model.num_layers, lengths),
        num_masked=sum(masked_counts),
        num_pairs=_num_pooled(model, len(lengths)),
    )


def _num_pooled(model: ModelSection, num_sequences: int) -> int:
    return num_sequences if model.objective == "mlm_nsp" else 0


def done_flops(model: ModelSection, batch: UnpaddedBatch) -> Flops:
    """Operations of our step on a batch: with padding, the last layer only where it is read.

    That layer's keys and values belong to all tokens, as ModernBERT's queries do, everything else
    to the rows that the heads read. Padding inside an attention policy (`grouped`,
    `reference`) is not counted.
    """
    num_tokens, num_masked = sum(batch.lengths), batch.labels.shape[0]
    num_pairs = _num_pooled(model, batch.next_sentence_label.shape[0])
    num_rows = num_masked + num_pairs
    whole = model.num_layers - 1
    of_all = (3 if model.architecture == "modern" else 2) * model.hidden_size**2
    rest = _layer_products(model) - of_all
    last = of_all * num_tokens + rest * num_rows
    return _flops(
        model,
        encoder=whole * _layer_products(model) * num_tokens + last,
        attended=_attended(model, whole, batch.lengths) + _attended_last(model, batch, num_pairs),
        num_masked=num_masked,
        num_pairs=num_pairs,
    )


def _attended(model: ModelSection, layers: int, lengths: Sequence[float]) -> float:
    """Pairs of tokens that see each other in the first `layers` layers."""
    num_global = sum(map(model.is_global, range(layers)))
    seen = num_global * sum(length**2 for length in lengths)
    if num_global == layers:
        return seen
    of_sequences = attended_tokens(np.asarray(lengths, dtype=np.float64), model.reach)
    return seen + (layers - num_global) * float(of_sequences.sum())


def _attended_last(model: ModelSection, batch: UnpaddedBatch, num_pairs: int) -> int:
    """Tokens that the last layer's rows see: those of their own sequence, or of its window.

    There is one row for each masked position, and one for the first token of each pair.
    """
    lengths, counts = np.array(batch.lengths), np.array(batch.masked_counts)
    if model.is_global(model.num_layers - 1):
        return int(lengths @ counts + lengths[:num_pairs].sum())
    rows, ends = batch.masked_token_index.cpu().numpy(), np.cumsum(lengths)
    sequence = np.searchsorted(ends, rows, side="right")
    before, after = rows - (ends - lengths)[sequence], ends[sequence] - 1 - rows
    return int((1 + np.minimum(before, model.reach) + np.minimum(after, model.reach)).sum())


def _layer_products(model: ModelSection) -> int:
    """Multiply-adds of a token in one layer without attention: 4 D^2 + 2 D F; gated, 3 D F."""
    matrices = 3 if model.architecture == "modern" else 2
    return 4 * model.hidden_size**2 + matrices * model.hidden_size * model.intermediate_size


def _flops(
    model: ModelSection, *, encoder: float, attended: float, num_masked: float, num_pairs: int
) -> Flops:
    """Operations from the encoder's multiply-adds, attended pairs of tokens, and head outputs."""
    hidden, factor = model.hidden_size, PER_MULTIPLY_ADD * PASSES
    return Flops(
        encoder=factor * encoder,
        attention=factor * 2 * hidden * attended,
        head=factor * (hidden**2 + hidden * model.padded_vocab_size) * num_masked,
        pooler=factor * (hidden**2 + 2 * hidden) * num_pairs,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """TFLOP/s of products in `dtype`; None, with a reason, if there are no such products."""

    dtype: str
    burst_tflops: float | None = None
    long_tflops: float | None = None
    reason: str | None = None


def measure_peak(
    model: ModelSection, num_tokens: int, device: torch.device, long_seconds: float
) -> Peak:
    """Products of [num_tokens, hidden] with feed-forward matrices, in a burst and a long run.

    `long_seconds`: LONG_SECONDS, or less if the number does not matter.
    """
    dtype = torch.float8_e4m3fn if model.precision == "fp8" else COMPUTED_IN[model.precision]
    name = str(dtype).removeprefix("torch.")
    rows = -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
    try:
        products = _products(rows, model.hidden_size, model.intermediate_size, dtype, device)
        timer = Timer(
            "products()", globals={"products": products}, num_threads=torch.get_num_threads()
        )
        once = timer.timeit(1).mean
        burst, long = (
            timer.timeit(max(1, round(each / once))).mean
            for each in (min(BURST_SECONDS, long_seconds), long_seconds)
        )
    except (RuntimeError, NotImplementedError) as error:
        return Peak(dtype=name, reason=str(error).splitlines()[0])
    # Two products a call.
    tera = 2 * PER_MULTIPLY_ADD * rows * model.hidden_size * model.intermediate_size / 1e12
    return Peak(dtype=name, burst_tflops=tera / burst, long_tflops=tera / long)


def _products(
    rows: int, hidden: int, wide: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """A function that does both products of the feed-forward part."""

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
