"""Triton kernels for the keep bits of dropout on a GPU, in which each lane calls Philox once.

One call yields one byte of keep bits, for eight elements. The readable reference is
`model/dropout_keys.py`. A step with these kernels can be captured, because the step number is read
on the device and every result has a fixed shape. These kernels have not been run on a GPU yet.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlperf_bert.model.dropout_keys import DropoutSite, threshold_of
from mlperf_bert.model.triton_parts import kernel

ROUNDS: tl.constexpr = tl.constexpr(7)
ROWS, BYTES = 16, 16  # tile of a program
ATTENTION_ROWS, ATTENTION_BYTES = 32, 8  # fewer bytes, so that less is wasted past a sequence's end
WARPS = 1  # for kernels that only compute bits, so that each thread has eight bytes of a row


def _kernel_of_site(function: Callable[..., None]) -> Any:
    # Without this, Triton would recompile for values that are 1 or a multiple of 16.
    names = ["seed", "stream", "num_rows", "num_sequences"]
    return triton.jit(function, do_not_specialize=names)


def keep_bits(site: DropoutSite, channels: int) -> Tensor:
    """Compute which elements a dropout keeps, as bits, uint8 [R, ceil(channels / 8)].

    See `model.dropout.keep_bits`.
    """
    num_rows, num_bytes = len(site.keys.positions), triton.cdiv(channels, 8)
    bits = _empty_bits(site, num_rows, num_bytes)
    if bits.numel() > 0:
        _keep_bits[_grid(num_rows, num_bytes)](
            bits, *_site_arguments(site), num_rows, num_bytes, ROWS, BYTES, num_warps=WARPS
        )
    return bits


def attention_keep_bits(
    site: DropoutSite,
    num_heads: int,
    cu_seqlens: Tensor,
    max_seqlen: int,
    cu_queries: Tensor | None = None,
) -> Tensor:
    """Compute which attention probabilities a dropout keeps, uint8 [R, N, ceil(max_seqlen / 8)].

    See `model.dropout.attention_keep_bits`. Bytes entirely past the end of a row's own sequence are
    not written, and neither are rows that belong to no sequence.
    """
    num_rows, num_bytes = len(site.keys.positions), triton.cdiv(max_seqlen, 8)
    bits = _empty_bits(site, num_rows, num_heads, num_bytes)
    num_sequences = len(cu_seqlens) - 1
    if bits.numel() > 0:
        bounds = cu_seqlens, cu_seqlens if cu_queries is None else cu_queries
        _attention_keep_bits[(triton.cdiv(num_rows, ATTENTION_ROWS), num_heads)](
            *(bits, *_site_arguments(site), bounds, num_sequences, num_rows, num_bytes),
            *(num_sequences.bit_length(), ATTENTION_ROWS, ATTENTION_BYTES),
            num_warps=WARPS,
        )
    return bits


def _empty_bits(site: DropoutSite, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=site.keys.positions.device)


def _grid(num_rows: int, num_bytes: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, ROWS), triton.cdiv(num_bytes, BYTES)


def _site_arguments(site: DropoutSite) -> tuple[tuple[Tensor, Tensor, Tensor], int, int, int]:
    keys, threshold = site.keys, threshold_of(site.probability)
    tensors = keys.sample_ids.contiguous(), keys.positions.contiguous(), keys.step
    return tensors, keys.seed, site.stream, threshold


@_kernel_of_site
def _keep_bits(
    bits: tl.tensor,
    keys: tl.tuple,
    seed: tl.tensor,
    stream: tl.tensor,
    threshold: tl.constexpr,
    num_rows: tl.tensor,
    num_bytes: tl.tensor,
    rows: tl.constexpr,
    bytes_: tl.constexpr,
) -> None:
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    byte = tl.program_id(1) * bytes_ + tl.arange(0, bytes_)
    token, sample = _counter_words(keys, stream, row, num_rows)
    kept = _kept_bytes(byte[None, :], token, sample, keys[2], seed, threshold)
    at = row.to(tl.int64)[:, None] * num_bytes + byte[None, :]
    tl.store(bits + at, kept, mask=(row < num_rows)[:, None] & (byte < num_bytes)[None, :])


@_kernel_of_site
def _attention_keep_bits(
    bits: tl.tensor,
    keys: tl.tuple,
    seed: tl.tensor,
    stream: tl.tensor,
    threshold: tl.constexpr,
    bounds: tl.tuple,
    num_sequences: tl.tensor,
    num_rows: tl.tensor,
    num_bytes: tl.tensor,
    search_steps: tl.constexpr,
    rows: tl.constexpr,
    bytes_: tl.constexpr,
) -> None:
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    head = tl.program_id(1)
    cu_keys, cu_queries = bounds
    sequence = _sequence_of(row, cu_queries, num_sequences, search_steps)
    is_real = (row < num_rows) & (sequence < num_sequences)
    length = tl.load(cu_keys + sequence + 1, mask=is_real, other=0)
    length -= tl.load(cu_keys + sequence, mask=is_real, other=0)
    token, sample = _counter_words(keys, stream, row, num_rows)
    row_bits = bits + (row.to(tl.int64) * tl.num_programs(1) + head)[:, None] * num_bytes
    longest = tl.max(length)
    first = 0
    # `range` is not used, for the reason given in optim/triton_kernels.py.
    while 8 * first < longest:
        byte = first + tl.arange(0, bytes_)[None, :]
        kept = _kept_bytes(byte | (head << 16), token, sample, keys[2], seed, threshold)
        # The mask covers whole words of eight bytes, so that the compiler stores each word at once.
        is_needed = (byte < (length[:, None] + 63) // 64 * 8) & (byte < num_bytes)
        tl.store(row_bits + byte, kept, mask=is_needed)
        first += bytes_


@kernel
def _counter_words(keys: tl.tuple, stream: tl.tensor, row: tl.tensor, num_rows: tl.tensor) -> Any:
    """Return the second and third counter words of some rows, as uint32 columns."""
    sample_ids, positions, _ = keys
    position = tl.load(positions + row, mask=row < num_rows, other=0).to(tl.uint32)
    sample = tl.load(sample_ids + row, mask=row < num_rows, other=0).to(tl.uint32)
    return (position | (stream.to(tl.uint32) << 16))[:, None], sample[:, None]


@kernel
def _kept_bytes(
    group: tl.tensor,
    token: tl.tensor,
    sample: tl.tensor,
    step: tl.tensor,
    seed: tl.tensor,
    threshold: tl.constexpr,
) -> Any:
    """Compute keep bits uint8 [rows, bytes] from int32 groups, like `dropout_keys.kept_bytes`."""
    last = tl.load(step).to(tl.uint32)
    words = tl.philox(seed, group.to(tl.uint32), token, sample, last, ROUNDS)
    kept = tl.zeros_like(words[0])
    for i in tl.static_range(4):
        kept |= ((words[i] & 0xFFFF) >= threshold).to(tl.uint32) << (2 * i)
        kept |= ((words[i] >> 16) >= threshold).to(tl.uint32) << (2 * i + 1)
    return kept.to(tl.uint8)


@kernel
def _sequence_of(
    row: tl.tensor, cu_queries: tl.tensor, num_sequences: tl.tensor, steps: tl.constexpr
) -> Any:
    """Find the number of each row's sequence, or `num_sequences` if the row belongs to none."""
    low, high = tl.zeros_like(row), tl.zeros_like(row) + num_sequences
    for _ in tl.static_range(steps):
        middle = (low + high) // 2
        end = tl.load(cu_queries + 1 + middle, mask=low < high, other=0)
        is_behind = (low < high) & (end <= row)
        low = tl.where(is_behind, middle + 1, low)
        high = tl.where(is_behind, high, middle)
    return low
