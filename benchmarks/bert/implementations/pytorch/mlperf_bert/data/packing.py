"""Packing of sequences into as few rows as possible, or into groups of similar length. No torch.

Source: Johnson, Near-optimal bin packing algorithms, 1973; for BERT's lengths, arXiv 2107.02027.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.errors import DataError
from mlperf_bert.data.sampler import Int64Array

# A group holds sequences no shorter than this share of its longest one, which trades fewer calls
# against less padding. Attention forward + backward in ms, fp32, one core with AVX-512, layout
# shared by two layers (minima of 12, 12 and 5 rounds, interleaved):   share
# one call each  1.0  0.95   0.9  0.85   0.8   0.7   0.5  0.01   B 32, lengths 10-64, N 4, H 32
# 5.2  5.2   4.6   4.3   4.2   4.2   4.2   4.7   6.2   B 32, lengths 10-64, N 2, H 64
# 4.8  5.1   4.5   4.3   4.1   4.0   4.2   4.4   5.6   B 16, mean 214 of 512, N 4, H 64
# 55.2 57.1  57.4  58.2  57.3  59.2  67.9 102.0 191.8
MIN_LENGTH_RATIO = 0.85


def best_fit_decreasing(lengths: NDArray[np.integer], capacity: int) -> Int64Array:
    """The row, 0 .. rows - 1, of each sequence: int64 [n].

    The longest sequence comes first. Each goes to the row in which it leaves the least space, or to
    a new one if none has enough. Sequences of one length are placed together, so that the work
    grows with the number of distinct lengths. `lengths` are integers [n], each at least 1;
    `capacity` is in tokens. Raises DataError if a sequence is longer than a row.
    """
    longest = int(lengths.max(initial=0))
    if longest > capacity:
        problem = f"a sequence of {longest} is longer than a row of {capacity}"
        raise DataError("packing", problem, "cut it, or use longer rows")
    rows = _Rows(capacity)
    placed: list[int] = []
    distinct, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        rows.place(length, count, placed)
    row = np.empty(len(lengths), dtype=np.int64)
    row[np.argsort(lengths, kind="stable")[::-1]] = placed
    return row


def cut_by_ratio(descending: NDArray[np.integer]) -> list[int]:
    """Bounds of the groups in lengths sorted from long to short."""
    cuts = [0]
    shortest_allowed = descending[0] * MIN_LENGTH_RATIO
    for i, length in enumerate(descending.tolist()):
        if length < shortest_allowed:
            cuts.append(i)
            shortest_allowed = length * MIN_LENGTH_RATIO
    return [*cuts, len(descending)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSizes:
    """Chunks of queries whose keys are those at most a reach away; all int64 [chunks].

    `sequence`, and the places in it of the first query and of the first key.
    """

    sequence: Int64Array
    start: Int64Array
    first_key: Int64Array
    num_keys: Int64Array


def cut_into_chunks(lengths: Int64Array, reach: int) -> ChunkSizes:
    """Sequences cut into chunks of 2 reach tokens, the last of each with what is left of it."""
    size = 2 * reach
    count = -(-lengths // size)
    sequence = np.repeat(np.arange(len(lengths)), count)
    start = (np.arange(len(sequence)) - (np.cumsum(count) - count)[sequence]) * size
    first_key = np.maximum(start - reach, 0)
    return ChunkSizes(
        sequence=sequence,
        start=start,
        first_key=first_key,
        num_keys=np.minimum(start + size + reach, lengths[sequence]) - first_key,
    )


class _Rows:
    """Rows by their free space; bit s of `_spaces` is set if a row has s tokens left."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._spaces = 0
        self._with_space: dict[int, list[int]] = {}
        self._num_rows = 0

    def place(self, length: int, count: int, placed: list[int]) -> None:
        """Place `count` sequences of one length, no longer than any before: append their rows."""
        while count:
            fitting = self._spaces >> length
            space = (fitting & -fitting).bit_length() - 1 + length if fitting else self._capacity
            # The row just used stays the tightest until the length no longer fits into it.
            each = min(space // length, count)
            chosen = self._take(space, count // each) if fitting else self._open(count // each)
            placed += chosen * each
            count -= len(chosen) * each
            left = space - each * length
            self._with_space.setdefault(left, []).extend(chosen)
            self._spaces |= 1 << left

    def _take(self, space: int, most: int) -> list[int]:
        rows = self._with_space[space]
        chosen = rows[-most:]
        del rows[-most:]
        if not rows:
            self._spaces ^= 1 << space
        return chosen

    def _open(self, number: int) -> list[int]:
        first = self._num_rows
        self._num_rows += number
        return list(range(first, self._num_rows))
