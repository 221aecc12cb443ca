"""Keyed permutations: an order for millions of samples that costs no memory.

Any element's image is computed on its own, so any step of any epoch can be drawn directly.
"""

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]

_FEISTEL_ROUNDS = (
    6  # four give a pseudo-random permutation of a random function; two more are cheap
)


def permute(index: Int64Array, size: int, key: tuple[int, ...]) -> Int64Array:
    """Images of `index` under a keyed permutation of 0 .. size - 1 (both int64 [n])."""
    sizes = np.full(len(index), size, dtype=np.uint64)
    return permute_many(index, sizes, np.zeros(len(index), dtype=np.uint64), key)


def permute_many(
    index: Int64Array, sizes: UInt64Array, tweaks: UInt64Array, key: tuple[int, ...]
) -> Int64Array:
    """Images under a family of permutations: element i under number `tweaks[i]`, of its size.

    A Feistel network over the smallest even number of bits that holds the largest size; an image
    outside is sent through again until it falls inside (cycle walking), at most 4 times on
    average where the sizes are about equal.

    Args:
        index: int64 [n], each at least 0 and below its size.
        sizes: uint64 [n]; equal where the tweak is.
        tweaks: uint64 [n], which permutation; number 0 is `permute`'s.
        key: what all of them are drawn from.
    """
    half_bits = max(1, -(-(int(sizes.max(initial=1)) - 1).bit_length() // 2))
    state = np.random.SeedSequence(key).generate_state(_FEISTEL_ROUNDS, np.uint64)
    round_keys = state.astype(np.uint64, copy=False)
    tweaks = _mix(tweaks)
    value = _feistel(index.astype(np.uint64), half_bits, round_keys, tweaks)
    outside = np.flatnonzero(value >= sizes)
    while len(outside):
        again = _feistel(value[outside], half_bits, round_keys, tweaks[outside])
        value[outside] = again
        outside = outside[again >= sizes[outside]]
    return value.astype(np.int64)


def _feistel(
    value: UInt64Array, half_bits: int, round_keys: UInt64Array, tweaks: UInt64Array
) -> UInt64Array:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ tweaks ^ round_key) & mask)
    return (left << shift) | right


def _mix(value: UInt64Array) -> UInt64Array:
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014): every input bit reaches every output."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
