"""Keyed permutations: an order for millions of samples that costs no memory.

Any element's image is computed on its own, so any step of any epoch can be drawn directly. Both
kinds are Feistel networks: two parts of a number, each changed in turn by a keyed function of the
other. An image outside the range is sent through again until it falls inside (cycle walking).
"""

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]

# Four rounds give a pseudo-random permutation of a random function; two more are cheap.
_FEISTEL_ROUNDS = 6


def permute(index: Int64Array, size: int, key: tuple[int, ...]) -> Int64Array:
    """Images of `index` under a keyed permutation of 0 .. size - 1 (both int64 [n]).

    The parts are bits: the smallest even number of them that holds the size. An image falls
    inside at least once in 4 times.
    """
    half_bits = max(1, -(-(size - 1).bit_length() // 2))
    round_keys = _round_keys(key)
    value = _by_bits(index.astype(np.uint64), half_bits, round_keys)
    outside = np.flatnonzero(value >= size)
    while len(outside):
        again = _by_bits(value[outside], half_bits, round_keys)
        value[outside] = again
        outside = outside[again >= size]
    return value.astype(np.int64)


def permute_many(
    index: Int64Array, sizes: Int64Array, numbers: Int64Array, key: tuple[int, ...]
) -> Int64Array:
    """Images under a family of permutations: element i under number `numbers[i]`, of its size.

    The parts are digits whose product is hardly larger than the size (Black and Rogaway, CT-RSA
    2002), so that groups of any sizes go through together and nearly all images fall inside.

    Args:
        index: int64 [n], each at least 0 and below its size.
        sizes: int64 [n], at most 2**53; equal where the number is.
        numbers: int64 [n], at least 0: which permutation.
        key: what all of them are drawn from.
    """
    limits = sizes.astype(np.uint64)
    high = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    low = (limits + high - np.uint64(1)) // high
    tweaks, round_keys = _mix(numbers.astype(np.uint64)), _round_keys(key)
    value = _by_digits(index.astype(np.uint64), high, low, round_keys, tweaks)
    outside = np.flatnonzero(value >= limits)
    while len(outside):
        again = _by_digits(value[outside], high[outside], low[outside], round_keys, tweaks[outside])
        value[outside] = again
        outside = outside[again >= limits[outside]]
    return value.astype(np.int64)


def _round_keys(key: tuple[int, ...]) -> UInt64Array:
    state = np.random.SeedSequence(key).generate_state(_FEISTEL_ROUNDS, np.uint64)
    return state.astype(np.uint64, copy=False)


def _by_bits(value: UInt64Array, half_bits: int, round_keys: UInt64Array) -> UInt64Array:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << shift) | right


def _by_digits(
    value: UInt64Array,
    high: UInt64Array,
    low: UInt64Array,
    round_keys: UInt64Array,
    tweaks: UInt64Array,
) -> UInt64Array:
    """One pass over value = left * low + right, left below `high` and right below `low`."""
    left = value // low
    right = value - left * low
    for key_of_left, key_of_right in round_keys.reshape(-1, 2):
        _add(left, _mix(right ^ tweaks ^ key_of_left), high)
        _add(right, _mix(left ^ tweaks ^ key_of_right), low)
    return left * low + right


def _add(digit: UInt64Array, bits: UInt64Array, base: UInt64Array) -> None:
    """Add random bits to a digit in place: their upper half, scaled to 0 .. base - 1."""
    bits >>= np.uint64(32)
    bits *= base
    bits >>= np.uint64(32)
    digit += bits
    np.minimum(digit, digit - base, out=digit)  # below `base` the difference wraps to a large one


def _mix(value: UInt64Array) -> UInt64Array:
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014): every input bit reaches every output."""
    value = value ^ (value >> np.uint64(30))
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value
