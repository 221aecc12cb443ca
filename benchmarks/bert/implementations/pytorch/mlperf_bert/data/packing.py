"""Group sequences of similar length, and cut long sequences into chunks, without using torch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.data.sampler import Int64Array

# The shortest sequence of a group has at least this fraction of the longest one's length. A low
# ratio needs fewer calls, and a high one less padding. The table shows how many milliseconds the
# forward and backward passes of attention took in fp32 on one core with AVX-512, with a layout
# shared by two layers. Values are minima of 12, 12 and 5 interleaved rounds. In the column
# "one each", attention was called once per sequence.
#   ratio                                 one each  1.0  0.95   0.9  0.85   0.8   0.7    0.5   0.01
#   B 32, lengths 10-64, N 4, H 32             5.2  5.2   4.6   4.3   4.2   4.2   4.2    4.7    6.2
#   B 32, lengths 10-64, N 2, H 64             4.8  5.1   4.5   4.3   4.1   4.0   4.2    4.4    5.6
#   B 16, mean length 214 of 512, N 4, H 64   55.2 57.1  57.4  58.2  57.3  59.2  67.9  102.0  191.8
MIN_LENGTH_RATIO = 0.85


def cut_by_ratio(descending: NDArray[np.integer]) -> list[int]:
    """Divide lengths, sorted in descending order, into groups of similar length.

    Returns the bounds of the groups: group i contains the lengths from bound i up to, but not
    including, bound i + 1. Within a group, no length is below MIN_LENGTH_RATIO times the longest.
    """
    cuts = [0]
    shortest_allowed = descending[0] * MIN_LENGTH_RATIO
    for i, length in enumerate(descending.tolist()):
        if length < shortest_allowed:
            cuts.append(i)
            shortest_allowed = length * MIN_LENGTH_RATIO
    return [*cuts, len(descending)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSizes:
    """Chunks of queries, each with the keys at most `reach` tokens before or after the chunk.

    `start` and `first_key` are the positions of a chunk's first query and first key within their
    sequence. All arrays are int64 [chunks].
    """

    sequence: Int64Array
    start: Int64Array
    first_key: Int64Array
    num_keys: Int64Array


def cut_into_chunks(lengths: Int64Array, reach: int) -> ChunkSizes:
    """Cut sequences into chunks of 2 * `reach` tokens. A sequence's last chunk may be shorter.

    A query can attend to keys at most `reach` tokens away.
    """
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
