"""Groups of sequences of similar length, and chunks of long ones. No torch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.data.sampler import Int64Array

# A group holds sequences no shorter than this share of its longest one, which trades fewer calls
# against less padding. Attention forward + backward in ms, fp32, one core with AVX-512, layout
# shared by two layers (minima of 12, 12 and 5 rounds, interleaved):   share
# one call each  1.0  0.95   0.9  0.85   0.8   0.7   0.5  0.01   B 32, lengths 10-64, N 4, H 32
# 5.2  5.2   4.6   4.3   4.2   4.2   4.2   4.7   6.2   B 32, lengths 10-64, N 2, H 64
# 4.8  5.1   4.5   4.3   4.1   4.0   4.2   4.4   5.6   B 16, mean 214 of 512, N 4, H 64
# 55.2 57.1  57.4  58.2  57.3  59.2  67.9 102.0 191.8
MIN_LENGTH_RATIO = 0.85


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
