"""Samples copied from mapped shards into a batch's arrays by compiled code, without the GIL.

The readable references are `SampleReader.read` (data/shards.py) and `make_batch` (data/batch.py).
Shape letters: n samples asked for, T tokens of all of them, P masked positions of all of them.
"""

from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from mlperf_bert.common.compiled import compiled

# One row a shard: the address of each of its arrays, and what is needed to stay within them.
SHARD_ROW = np.dtype(
    [
        ("input_ids", np.uint64),
        ("offsets", np.uint64),
        ("segment_b_start", np.uint64),
        ("masked_lm_positions", np.uint64),
        ("masked_lm_ids", np.uint64),
        ("masked_lm_offsets", np.uint64),
        ("next_sentence_label", np.uint64),
        ("num_samples", np.int64),
        ("num_tokens", np.int64),
        ("num_masked", np.int64),
        ("input_id_bytes", np.int64),  # 2 or 4
        ("masked_id_bytes", np.int64),  # 2 or 4
    ]
)
SPANS_ARE_GOOD = -1

# What `fill` found out of range: bit i stands for name i.
CHECKED = (
    "input_ids",
    "masked_lm_ids",
    "segment_b_start",
    "masked_lm_positions",
    "next_sentence_label",
)


def _as_pointer(_typing: Any, address: Any) -> Any:
    """An address as the pointer that `carray` takes."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


_pointer: Any = intrinsic(_as_pointer)


@compiled
def measure(
    table: NDArray[Any],
    numbers: NDArray[np.int64],
    rows: NDArray[np.int64],
    max_length: int,
    max_masked: int,
    spans: NDArray[np.int64],
) -> int:
    """Where the tokens and masked positions of samples lie within their shards.

    Args:
        table: SHARD_ROW [shards]; those of `numbers` are filled in.
        numbers: int64 [n], the shard of each sample.
        rows: int64 [n], its row there.
        max_length: tokens of a sample at most.
        max_masked: masked positions of a sample at most.
        spans: int64 [n, 4], written: start and end of the tokens, of the masked positions.

    Returns:
        SPANS_ARE_GOOD, or 2 i (tokens) or 2 i + 1 (masked positions) where those of sample i are
        not: empty, too long or outside the shard. `spans` holds them, as the shard has them.
    """
    for i in range(len(rows)):
        shard, row = table[numbers[i]], rows[i]
        ends = shard.num_samples + 1
        offsets = carray(_pointer(shard.offsets), (ends,), np.int64)
        masked_offsets = carray(_pointer(shard.masked_lm_offsets), (ends,), np.int64)
        spans[i, 0], spans[i, 1] = offsets[row], offsets[row + 1]
        spans[i, 2], spans[i, 3] = masked_offsets[row], masked_offsets[row + 1]
        if not _is_good(spans[i, 0], spans[i, 1], shard.num_tokens, max_length):
            return 2 * i
        if not _is_good(spans[i, 2], spans[i, 3], shard.num_masked, max_masked):
            return 2 * i + 1
    return SPANS_ARE_GOOD


@compiled
def _is_good(start: int, end: int, total: int, limit: int) -> bool:
    return 0 <= start < end <= total and end - start <= limit


@compiled
def fill(
    table: NDArray[Any],
    numbers: NDArray[np.int64],
    rows: NDArray[np.int64],
    spans: NDArray[np.int64],
    vocab_size: int,
    has_pairs: bool,
    input_ids: NDArray[np.int64],
    position_ids: NDArray[np.int64],
    token_type_ids: NDArray[np.int64],
    cu_seqlens: NDArray[np.int32],
    masked_token_index: NDArray[np.int64],
    labels: NDArray[np.int64],
    next_sentence_label: NDArray[np.int64],
) -> int:
    """Lay samples end to end; the arrays from `input_ids` on are written, shaped as in a batch.

    Where samples are no pairs, segment B begins at their end. `spans` are those that `measure`
    found good: the offsets are not read again, because a file that changes in between must not
    move a write out of the batch.

    Returns:
        0, or the bits of those of CHECKED that hold a value out of range.
    """
    wrong = 0
    token, masked = 0, 0
    cu_seqlens[0] = 0
    for i in range(len(rows)):
        shard, row = table[numbers[i]], rows[i]
        start, end, masked_start, masked_end = spans[i]
        length, count = end - start, masked_end - masked_start
        largest = _copy(
            shard.input_ids, shard.input_id_bytes, start, input_ids[token : token + length]
        )
        wrong |= largest >= vocab_size
        largest = _copy(
            shard.masked_lm_ids,
            shard.masked_id_bytes,
            masked_start,
            labels[masked : masked + count],
        )
        wrong |= (largest >= vocab_size) << 1
        starts_of_b = carray(_pointer(shard.segment_b_start), (shard.num_samples,), np.uint16)
        segment_b_start = np.int64(starts_of_b[row])
        wrong |= (segment_b_start >= length if has_pairs else segment_b_start != length) << 2
        for position in range(length):
            position_ids[token + position] = position
            token_type_ids[token + position] = position >= segment_b_start
        index = masked_token_index[masked : masked + count]
        largest = _copy(shard.masked_lm_positions, 2, masked_start, index)
        wrong |= (largest >= length) << 3
        index += token
        next_labels = carray(_pointer(shard.next_sentence_label), (shard.num_samples,), np.uint8)
        next_sentence_label[i] = next_labels[row]
        wrong |= (next_labels[row] > 1) << 4
        token += length
        masked += count
        cu_seqlens[i + 1] = token
    return wrong


@compiled
def _copy(address: int, item_bytes: int, start: int, target: NDArray[np.int64]) -> Any:
    """Copy unsigned numbers of 2 or 4 bytes from element `start` on; returns the largest."""
    if item_bytes == 2:
        return _copy_all(
            carray(_pointer(address), (start + len(target),), np.uint16)[start:], target
        )
    return _copy_all(carray(_pointer(address), (start + len(target),), np.uint32)[start:], target)


@compiled
def _copy_all(source: NDArray[Any], target: NDArray[np.int64]) -> Any:
    largest = np.int64(0)
    for i in range(len(target)):
        value = np.int64(source[i])
        target[i] = value
        largest = max(largest, value)
    return largest
