"""Which samples make up the global batch of a step: a pure function of (seed, step).

Nothing here knows ranks. The order inside an epoch comes from a keyed permutation, so no shuffled
list is stored: 160 million samples cost no memory, and any step can be computed on its own.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]

_FEISTEL_ROUNDS = (
    6  # four give a pseudo-random permutation of a random function; two more are cheap
)


class Sampler(Protocol):
    """Draws global batches."""

    def global_batch(self, step: int) -> Int64Array:
        """Sample ids, int64 [global_batch_size], of a step counted from 1."""


class UniformSampler:
    """Every sample exactly once an epoch, in an order drawn anew for each epoch.

    Epochs follow each other without a gap: a global batch may hold the end of one and the start
    of the next.
    """

    def __init__(self, num_samples: int, global_batch_size: int, seed: int) -> None:
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.seed = seed

    def global_batch(self, step: int) -> Int64Array:
        """Sample ids, int64 [global_batch_size], of a step counted from 1."""
        start = (step - 1) * self.global_batch_size
        position = np.arange(start, start + self.global_batch_size, dtype=np.int64)
        epoch, offset = np.divmod(position, self.num_samples)
        ids = np.empty_like(offset)
        for number in np.unique(epoch):
            rows = epoch == number
            ids[rows] = permute(offset[rows], self.num_samples, (self.seed, int(number)))
        return ids


def permute(index: Int64Array, size: int, key: tuple[int, int]) -> Int64Array:
    """Images of `index` under a keyed permutation of 0 .. size - 1 (both int64 [n]).

    A Feistel network over the smallest even number of bits that holds `size`; an image outside
    is sent through again until it falls inside (cycle walking), at most 4 times on average.
    """
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    state = np.random.SeedSequence(key).generate_state(_FEISTEL_ROUNDS, np.uint64)
    round_keys = state.astype(np.uint64, copy=False)
    value = _feistel(index.astype(np.uint64), half_bits, round_keys)
    outside = value >= size
    while outside.any():
        value[outside] = _feistel(value[outside], half_bits, round_keys)
        outside = value >= size
    return value.astype(np.int64)


def _feistel(value: UInt64Array, half_bits: int, round_keys: UInt64Array) -> UInt64Array:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << shift) | right


def _mix(value: UInt64Array) -> UInt64Array:
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014): every input bit reaches every output."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
