"""Keyed dropout, in which seed, step, stream, sample and position determine what is dropped.

Dropout does not use torch's generator. The same elements are therefore dropped after a restart, in
a captured step, and if the batch is ordered or split differently. docs/concepts/numerics.md,
"Dropout", defines which elements are dropped, and `dropout_keys.py` contains readable reference
code. On a CPU the loops in this file compile to vector instructions. With AVX-512 they take 0.2 ns
per element, compared with 5.8 ns for torch's `bernoulli_`.

Shapes use the letters R (tokens, which are rows) and N (heads).
"""

from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlperf_bert.compiled import compiled
from mlperf_bert.model.dropout_keys import (
    MASK,
    ROUNDS,
    DropoutSite,
    Words,
    kept_bytes,
    scale_of,
    threshold_of,
)

INTEGERS = MappingProxyType(  # the integer type of the same width as each float type
    {
        torch.float16: torch.int16,
        torch.bfloat16: torch.int16,
        torch.float32: torch.int32,
        torch.float64: torch.int64,
    }
)
# These are unsigned 64-bit integers, because numba converts a mix of signed and unsigned integers
# to floats.
WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)
MULTIPLIER_A, MULTIPLIER_C = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_STEP_0, KEY_STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


def dropout(x: Tensor, site: DropoutSite | None) -> Tensor:
    """Set random elements of `x` to zero and scale the others so that the mean is preserved.

    Source: Srivastava et al., JMLR 15 (2014), in its inverted form. On a CPU the scale is rounded
    to the dtype of `x`. On a GPU it is rounded to float32 if `x` has less than 32 bits per element.

    Args:
        x: [R, C] or [R, ...], where all dimensions after R are channels, in a floating dtype.
        site: contains the dropout keys of the R rows. If it is None, nothing is dropped.
    """
    if site is None:
        return x
    if x.device.type == "cuda":
        return drop_by_bits(x, site)
    num_rows, channels = x.shape[0], x.shape[1:].numel()
    factors = torch.empty(x.shape, dtype=x.dtype)
    _write_factors(site, factors, np.arange(num_rows) * channels, np.full(num_rows, channels))
    return x * factors


def drop_by_bits(x: Tensor, site: DropoutSite) -> Tensor:
    """Drop the elements of `x` whose keep bit is 0, as `dropout` does on a GPU.

    Only the readable blocks (`model.kernels = "reference"`) call this on a GPU, because the fused
    blocks read the bits in their own kernels.
    """
    channels = x.shape[1:].numel()
    elements = torch.arange(8, dtype=torch.uint8, device=x.device)
    bits = keep_bits(site, channels)[..., None] >> elements & 1
    is_kept = bits.flatten(1)[:, :channels].view(x.shape) == 1
    return torch.where(is_kept, x * scale_of(site.probability), 0.0)


def attention_factors(
    site: DropoutSite,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the dropout factors (0 or the scale) of padded attention's probabilities on a CPU.

    Args:
        site: contains the dropout keys of the R = b * sq query slots, in the order of the slots.
        shape: the shape [b, N, sq, sk] of the probabilities.
        dtype: dtype of the probabilities.

    Returns:
        The factors [b, N, sq, sk], contiguous. Padding after a sequence gets factors as well.
    """
    num_sequences, num_heads, num_queries, row_length = shape
    rows_before = np.arange(num_sequences)[:, None] * (num_heads * num_queries)
    starts = (rows_before + np.arange(num_queries)).ravel() * row_length
    factors = torch.empty(shape, dtype=dtype)
    counts = np.full(len(starts), row_length)
    _write_factors(site, factors, starts, counts, num_heads, num_queries * row_length)
    return factors


def _write_factors(
    site: DropoutSite,
    factors: Tensor,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    num_heads: int = 1,
    head_stride: int = 0,
) -> None:
    keys, bits = site.keys, INTEGERS[factors.dtype]
    scale = torch.tensor([scale_of(site.probability)], dtype=factors.dtype)
    assert len(keys.positions) == len(starts) == len(counts)
    _write_all_factors(
        factors.view(bits).view(-1).numpy(),
        scale.view(bits).numpy()[0],
        threshold_of(site.probability),
        starts,
        counts,
        num_heads,
        head_stride,
        keys.sample_ids.contiguous().numpy(),
        keys.positions.contiguous().numpy(),
        site.stream,
        np.uint64(keys.step.item()),
        np.uint64(keys.seed & 2**64 - 1),
    )


def keep_bits(site: DropoutSite, channels: int) -> Tensor:
    """Compute which elements of [R, channels] a dropout keeps, as one bit per element.

    Bit e of byte k is set if element 8 k + e of the row is kept.

    Returns:
        uint8 [R, ceil(channels / 8)]. Bits after the last channel may have any value.
    """
    device = site.keys.positions.device
    if device.type == "cuda":
        from mlperf_bert.model import triton_dropout

        return triton_dropout.keep_bits(site, channels)
    groups = torch.arange(-(-channels // 8), device=device)
    return kept_bytes(
        _counter(groups, site, (-1, 1)), site.keys.seed, threshold_of(site.probability)
    )


def attention_keep_bits(
    site: DropoutSite,
    num_heads: int,
    cu_seqlens: Tensor,
    max_seqlen: int,
    cu_queries: Tensor | None = None,
) -> Tensor:
    """Compute which attention probabilities of R queries a dropout keeps, as one bit per key.

    Bit e of byte k belongs to key 8 k + e. Keys are numbered by their position within their
    sequence.

    Args:
        site: contains the dropout keys of the R query tokens.
        num_heads: the number N of heads.
        cu_seqlens: int32 [B + 1], bounds of the keys.
        max_seqlen: an upper limit on the number of keys of one sequence.
        cu_queries: int32 [B + 1]. Query rows cu_queries[i] .. cu_queries[i + 1] - 1 belong to
            sequence i. None means that the bounds equal cu_seqlens.

    Returns:
        uint8 [R, N, ceil(max_seqlen / 8)]. Bytes entirely past the end of a row's own sequence may
        have any value, and so may rows starting at cu_queries[-1].
    """
    device = site.keys.positions.device
    if device.type == "cuda":
        from mlperf_bert.model import triton_dropout

        return triton_dropout.attention_keep_bits(
            site, num_heads, cu_seqlens, max_seqlen, cu_queries
        )
    groups = torch.arange(-(-max_seqlen // 8), device=device)
    heads = torch.arange(num_heads, device=device)[:, None]
    counter = _counter(groups | heads << 16, site, (-1, 1, 1))
    return kept_bytes(counter, site.keys.seed, threshold_of(site.probability))


def _counter(groups: Tensor, site: DropoutSite, row_shape: tuple[int, ...]) -> Words:
    keys = site.keys
    rows = (keys.positions | site.stream << 16).view(row_shape)
    return groups, rows, (keys.sample_ids & MASK).view(row_shape), keys.step & MASK


@compiled
def _write_all_factors(
    factors: NDArray[Any],
    scale: Any,
    threshold: int,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    num_heads: int,
    head_stride: int,
    sample_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    stream: int,
    step: np.uint64,
    seed: np.uint64,
) -> None:
    """Write 0 or the scale to `counts` adjacent elements of `factors` for each row and head.

    `factors` is flat. `factors` and `scale` contain the bit patterns of floats as integers of the
    same width. The elements of a row start at index `starts` [R] for head 0, and `head_stride`
    elements later for each further head. Each element has a 16-bit random number. An element
    becomes 0 if the number is below `threshold`.
    """
    limit, zero = np.uint16(threshold), factors.dtype.type(0)
    max_groups = (max(counts) + 7) // 8 if len(counts) > 0 else 0
    counters = np.empty(num_heads * max_groups, dtype=np.uint64)
    words = np.empty(2 * len(counters), dtype=np.uint64)
    values = words.view(np.uint16)  # in element order, because the machine is little-endian
    groups = -1
    for row in range(len(starts)):
        count = counts[row]
        if groups != (count + 7) // 8:
            groups = (count + 7) // 8
            for head in range(num_heads):
                for group in range(groups):
                    counters[head * groups + group] = np.uint64(head << 16 | group)
        token = np.uint64(positions[row] | stream << 16)
        sample = np.uint64(sample_ids[row]) & WORD
        _philox(counters[: num_heads * groups], token, sample, step, seed, words)
        for head in range(num_heads):
            start = starts[row] + head * head_stride
            row_factors = factors[start : start + count]
            drawn = values[8 * groups * head :]
            for i in range(count):
                row_factors[i] = zero if drawn[i] < limit else scale


@compiled
def _philox(
    counters: NDArray[np.uint64],
    token: np.uint64,
    sample: np.uint64,
    step: np.uint64,
    seed: np.uint64,
    words: NDArray[np.uint64],
) -> None:
    """Compute two pairs of 32-bit random words per counter with Philox 4x32.

    The first word of a pair is in the low half of an element of `words`.
    """
    for i in range(len(counters)):
        a, b, c, d = counters[i], token, sample, step & WORD
        key_0, key_1 = seed & WORD, seed >> WORD_BITS
        for _ in range(ROUNDS):
            product_a, product_c = a * MULTIPLIER_A, c * MULTIPLIER_C
            a, b = (product_c >> WORD_BITS) ^ b ^ key_0, product_c & WORD
            c, d = (product_a >> WORD_BITS) ^ d ^ key_1, product_a & WORD
            key_0, key_1 = (key_0 + KEY_STEP_0) & WORD, (key_1 + KEY_STEP_1) & WORD
        words[2 * i] = a | b << WORD_BITS
        words[2 * i + 1] = c | d << WORD_BITS
