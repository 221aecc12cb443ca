"""Dropout whose every element is a function of its key: seed, step, stream, sample, position.

So a restart, another order or cut of the batch and a captured step drop the same elements; nothing
is drawn from torch's generator. docs/numerics.md, "Dropout", has the definition; `model/philox.py`
is its readable form.

Shape letters: R tokens (rows), N heads.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlperf_bert.model.compiled_dropout import write_factors
from mlperf_bert.model.philox import MASK, Words, kept_bytes

NUM_VALUES = 2**16  # of the random number that decides about one element
INTEGERS = MappingProxyType(  # as wide as these floats
    {
        torch.float16: torch.int16,
        torch.bfloat16: torch.int16,
        torch.float32: torch.int32,
        torch.float64: torch.int64,
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class DropoutKeys:
    """Of R tokens: what decides, with a stream's and a channel's number, what is dropped of them.

    `step` int64 [1] is the number of the update, on the device; a captured step overwrites it.
    """

    seed: int
    step: Tensor
    sample_ids: Tensor  # int64 [R]
    positions: Tensor  # int64 [R]: within their samples, in 0 .. 65,535

    def rows(self, index: Tensor) -> Self:
        """Those of some tokens, int64 [r]."""
        return replace(
            self,
            sample_ids=self.sample_ids.index_select(0, index),
            positions=self.positions.index_select(0, index),
        )


@dataclass(frozen=True, slots=True, eq=False)
class DropoutSite:
    """One dropout of the model: `stream` tells it from the others, in 0 .. 65,535."""

    probability: float
    stream: int
    keys: DropoutKeys


def make_site(probability: float, stream: int, keys: DropoutKeys | None) -> DropoutSite | None:
    """None, which drops nothing, without keys (in evaluation) or where the probability is 0."""
    return None if keys is None or probability == 0 else DropoutSite(probability, stream, keys)


def threshold_of(probability: float) -> int:
    """How many of the 65,536 values of an element's 16 bits drop it."""
    return min(round(probability * NUM_VALUES), NUM_VALUES - 1)


def scale_of(probability: float) -> float:
    """What kept elements are multiplied by, so that the mean stays: goes with the rounded rate."""
    return NUM_VALUES / (NUM_VALUES - threshold_of(probability))


def dropout(x: Tensor, site: DropoutSite | None) -> Tensor:
    """`x` with elements set to zero at random and the others scaled to keep the mean.

    Source: Srivastava et al., JMLR 15 (2014), in its inverted form. On a CPU the scale is rounded
    to the dtype of `x`, on a GPU to float32 if that is shorter than 32 bits.

    Args:
        x: [R, C] or [R, ...], whose elements behind R are the channels; floating dtype.
        site: its keys are those of the R rows; None drops nothing.
    """
    if site is None:
        return x
    if x.device.type == "cuda":
        from mlperf_bert.model import triton_dropout

        return triton_dropout.dropout(x, site)
    num_rows, channels = x.shape[0], x.shape[1:].numel()
    factors = torch.empty(x.shape, dtype=x.dtype)
    _write_factors(site, factors, np.arange(num_rows) * channels, np.full(num_rows, channels))
    return x * factors


def attention_factors(
    site: DropoutSite,
    shape: torch.Size,
    dtype: torch.dtype,
    first_key: Tensor | None = None,
    num_keys: Tensor | None = None,
) -> Tensor:
    """What probabilities of padded attention are multiplied by: 0 or the scale. On a CPU.

    Args:
        site: its keys are those of the R = b * sq query slots, in the order of the slots.
        shape: [b, N, sq, sk] of the probabilities.
        dtype: of the probabilities.
        first_key: int64 [R]: where in its row of sk the keys of the slot's own sequence begin.
        num_keys: int64 [R]: how many they are. Both are None where each sequence has a row of its
            own; then padding behind it has factors too.

    Returns:
        [b, N, sq, sk], contiguous; zero where there is no key of the slot's own sequence.
    """
    num_sequences, num_heads, num_queries, row_length = shape
    rows_before = np.arange(num_sequences)[:, None] * (num_heads * num_queries)
    starts = (rows_before + np.arange(num_queries)).ravel() * row_length
    if first_key is None or num_keys is None:
        factors = torch.empty(shape, dtype=dtype)
        counts = np.full(len(starts), row_length)
    else:
        assert bool((first_key + num_keys <= row_length).all())  # the compiled loop does not look
        factors = torch.zeros(shape, dtype=dtype)
        starts += first_key.numpy()
        counts = num_keys.numpy()
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
    write_factors(
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
    """Which elements of [R, channels] are kept: bit e of byte k is set where 8 k + e is.

    Returns:
        uint8 [R, ceil(channels / 8)]; bits behind the last channel may have any value.
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
    """Which attention probabilities of R queries are kept: bit e of byte k of key 8 k + e.

    A key's number is its position within its sequence.

    Args:
        site: its keys are those of the R query tokens.
        num_heads: N.
        cu_seqlens: int32 [B + 1], of the keys.
        max_seqlen: keys of the longest sequence, at least.
        cu_queries: int32 [B + 1]: query rows cu_queries[i] .. cu_queries[i + 1] are sequence i's;
            None where they are cu_seqlens.

    Returns:
        uint8 [R, N, ceil(max_seqlen / 8)]. Bytes wholly behind a row's own sequence, and rows from
        cu_queries[-1] on, may have any value.
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
