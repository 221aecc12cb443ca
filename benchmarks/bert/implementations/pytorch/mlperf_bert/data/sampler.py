"""Draw the samples of a step's global batch as a pure function of (seed, step).

A sampler does not depend on the number of ranks. One epoch follows another without a gap. If the
number of samples is not a multiple of the global batch, the last samples of an epoch share a batch
with the first samples of the next epoch.

The published samplers draw fixed counts from strata, which are ranges of length (arXiv 2402.02447).
Long sequences may therefore be drawn more often than they occur in the data.

The order of an epoch is a keyed permutation, so no list of millions of samples needs to be stored.
The permutation of each element is computed independently, so any step of any epoch can be drawn
without drawing the steps before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.config.sections import SamplerName
from mlperf_bert.errors import ConfigError

MOST_QUANTILES = 64
NUM_STRATA = 4  # strata of equal width, for example 1-128, 129-256, 257-384 and 385-512 tokens

# Published numbers of samples per stratum in every 16 or 12 samples of the global batch.
PUBLISHED_COUNTS = {"stratified_6_3_2_5": (6, 3, 2, 5), "stratified_4_2_2_4": (4, 2, 2, 4)}

Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]

# Four rounds are enough to turn a random function into a pseudo-random permutation. Two more are a
# safety margin that costs little.
_FEISTEL_ROUNDS = 6


class Sampler(Protocol):
    """The interface of all samplers."""

    def global_batch(self, step: int) -> Int64Array:
        """Draw the sample ids of a step, int64 [global_batch_size]. Steps are counted from 1.

        Every contiguous part of the batch is representative, because the lengths of neighboring
        samples vary as much as in the whole batch.
        """


class UniformSampler:
    """A sampler that draws each sample exactly once per epoch, in a new random order each time."""

    def __init__(
        self, num_samples: int, global_batch_size: int, seed: int, skip_samples: int = 0
    ) -> None:
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.seed = seed
        self._skip_samples = skip_samples

    def global_batch(self, step: int) -> Int64Array:
        """Draw the sample ids of a step, int64 [global_batch_size]. Steps are counted from 1."""
        ids = []
        of_epochs = epochs_of(step, self.global_batch_size, self.num_samples, self._skip_samples)
        for epoch, offset in of_epochs:
            ids.append(permute(offset, self.num_samples, (self.seed, epoch)))
        return np.concatenate(ids)


class QuantileSampler:
    """A sampler that draws the same number of samples from each of q quantiles of the length.

    Here, a quantile is a range of lengths that contains about 1/q of the samples. Every sample is
    drawn exactly once per epoch, so that the sampler is unbiased. The number of tokens per batch
    hardly varies, because every batch has the same number of samples from each quantile. The order
    of an epoch is a table with one column per quantile, which is read row by row. If q does not
    divide the number of samples, some quantiles have one sample more, and these samples form the
    last row.
    """

    def __init__(
        self,
        order_by_length: NDArray[Any],
        global_batch_size: int,
        seed: int,
        skip_samples: int = 0,
    ) -> None:
        """Prepare to draw sample ids from `order_by_length`.

        `order_by_length` contains the sample ids sorted by length. It is an integer array [N] and
        may be a memory map.
        """
        self._order = order_by_length
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._skip_samples = skip_samples
        count = num_quantiles(global_batch_size)
        self._starts = np.arange(count + 1, dtype=np.int64) * len(order_by_length) // count
        self._sizes = np.diff(self._starts)
        self._columns = _spread(count)
        self._larger = np.flatnonzero(self._sizes > len(order_by_length) // count)

    def global_batch(self, step: int) -> Int64Array:
        """Draw the sample ids of a step, int64 [global_batch_size]. Steps are counted from 1."""
        num_samples, count = len(self._order), len(self._sizes)
        ids = []
        of_epochs = epochs_of(step, self._global_batch_size, num_samples, self._skip_samples)
        for epoch, offset in of_epochs:
            row, column = np.divmod(offset, count)
            quantile = self._columns[column]
            is_last = row == num_samples // count
            quantile[is_last] = self._larger[column[is_last]]
            image = permute_many(row, self._sizes[quantile], quantile, (self._seed, epoch))
            ids.append(self._order[self._starts[quantile] + image].astype(np.int64))
        return np.concatenate(ids)


def num_quantiles(global_batch_size: int) -> int:
    """Return the number of quantiles, which is the largest divisor of the global batch up to 64."""
    most = min(MOST_QUANTILES, global_batch_size)
    return next(q for q in range(most, 0, -1) if global_batch_size % q == 0)


def epochs_of(
    step: int, global_batch_size: int, num_samples: int, skip_samples: int = 0
) -> list[tuple[int, Int64Array]]:
    """Return each epoch that a step draws from, with the positions to draw in that epoch.

    Each element is a pair of the epoch's number and int64 positions in its order.
    """
    start = skip_samples + (step - 1) * global_batch_size
    stop = start + global_batch_size
    parts = []
    for epoch in range(start // num_samples, (stop - 1) // num_samples + 1):
        first = epoch * num_samples
        offsets = np.arange(max(start, first), min(stop, first + num_samples)) - first
        parts.append((epoch, offsets.astype(np.int64)))
    return parts


def _spread(count: int) -> Int64Array:
    """Return a permutation of 0 .. count - 1 whose neighboring values are far apart.

    The order is that of the van der Corput sequence in base 2.
    """
    bits = max(1, (count - 1).bit_length())
    reversed_bits = [int(f"{number:0{bits}b}"[::-1], 2) for number in range(count)]
    spread: Int64Array = np.argsort(np.argsort(reversed_bits)).astype(np.int64)
    return spread


def make_sampler(
    name: SamplerName,
    *,
    order_by_length: NDArray[Any],
    length_histogram: Sequence[int],
    global_batch_size: int,
    seed: int,
    skip_samples: int = 0,
) -> Sampler:
    """Create the sampler that the config selects, for a prepared set.

    Args:
        name: the sampler's name in the config.
        order_by_length: sample ids sorted by length, integers [N].
        length_histogram: element k is the number of samples with k tokens.
        global_batch_size: samples per step.
        seed: determines the random order of the samples.
        skip_samples: number of samples to skip at the start of the sampler's order. The order of
            all other samples does not change. This order depends on the seed and, for "quantile",
            on `num_quantiles`. For the published samplers, the config accepts only 0.

    Raises ConfigError if the sampler does not support this batch size or this set.
    """
    if name == "uniform":
        return UniformSampler(len(order_by_length), global_batch_size, seed, skip_samples)
    if name == "quantile":
        return QuantileSampler(order_by_length, global_batch_size, seed, skip_samples)
    assert not skip_samples
    strata = Strata.of(order_by_length, length_histogram)
    return PublishedStrataSampler(strata, PUBLISHED_COUNTS[name], global_batch_size, seed)


@dataclass(frozen=True, slots=True)
class Strata:
    """The non-empty strata (ranges of length) of a prepared set."""

    order_by_length: NDArray[Any]  # integer [N]: sample ids by length
    starts: Int64Array  # [K]: index of each stratum's first sample in `order_by_length`
    sizes: Int64Array  # [K]
    mean_lengths: NDArray[np.float64]  # [K]
    names: tuple[str, ...]  # [K]: for example "1-128"

    @classmethod
    def of(cls, order_by_length: NDArray[Any], length_histogram: Sequence[int]) -> "Strata":
        """Divide a set into strata that cover equally wide ranges of length.

        `length_histogram[k]` is the number of samples with k tokens.
        """
        counts = np.asarray(length_histogram, dtype=np.int64)
        max_length = len(counts) - 1
        edges = [-(-max_length * number // NUM_STRATA) for number in range(NUM_STRATA + 1)]
        starts, sizes, means, names = [], [], [], []
        begin = int(counts[0])
        for low, high in pairwise(edges):
            inside = counts[low + 1 : high + 1]
            size = int(inside.sum())
            if size:
                starts.append(begin)
                sizes.append(size)
                means.append(float(inside @ np.arange(low + 1, high + 1) / size))
                names.append(f"{low + 1}-{high}")
            begin += size
        return cls(
            order_by_length, np.array(starts), np.array(sizes), np.array(means), tuple(names)
        )

    @property
    def mean_length(self) -> float:
        """Mean number of tokens per sample over the whole set."""
        return float(self.sizes @ self.mean_lengths / self.sizes.sum())

    def draw(
        self, stratum: Int64Array, index: Int64Array, round_number: Int64Array, seed: int
    ) -> Int64Array:
        """Return sample ids, each given by its stratum, its round and its position in the round.

        In each round, the samples of a stratum are drawn in a new random order. All arrays,
        including the result, are int64 [n].
        """
        number = round_number * len(self.sizes) + stratum
        image = permute_many(index, self.sizes[stratum], number, (seed,))
        ids: Int64Array = self.order_by_length[self.starts[stratum] + image].astype(np.int64)
        return ids


class PublishedStrataSampler:
    """A sampler that draws a fixed number of samples from each stratum, as in the published runs.

    The numbers apply to every 16 or 12 consecutive samples. Samples of a stratum are drawn without
    replacement. When all have been drawn, the stratum starts its next round. A pass ends when a
    stratum has too few samples left for a full step. The samples of other strata that are left at
    that point are drawn first in the next pass. Because the sampler is biased toward some lengths,
    the run reports the mean length of the drawn samples.
    """

    def __init__(
        self, strata: Strata, counts: Sequence[int], global_batch_size: int, seed: int
    ) -> None:
        """Prepare to draw `counts[i]` samples from stratum i in every `sum(counts)` samples.

        Raises ConfigError if the counts do not match the batch size or the sizes of the strata.
        """
        group = sum(counts)
        if global_batch_size % group:
            problem = f"needs a global batch that is a multiple of {group}, not {global_batch_size}"
            remedy = "change parallel.local_batch_size, or use 'quantile'"
            raise ConfigError("data.sampler", problem, remedy)
        if len(strata.sizes) != len(counts):
            problem = (
                f"needs samples in {len(counts)} length ranges, but the data has only samples of "
                f"{', '.join(strata.names)} tokens"
            )
            remedy = "use 'quantile', which works with any lengths"
            raise ConfigError("data.sampler", problem, remedy)
        self._strata = strata
        self._counts = np.array(counts)
        self._groups = global_batch_size // group
        # The stratum of each sample of a group, and its number among the draws of the stratum. The
        # draws of each stratum are spread evenly over the group.
        stratum = np.repeat(np.arange(len(counts)), counts)
        number = np.concatenate([np.arange(count) for count in counts])
        spread = np.argsort((number + 0.5) / self._counts[stratum], kind="stable")
        self._stratum, self._number = stratum[spread], number[spread]
        self._seed = seed
        if not self.steps_of_pass:
            problem = (
                f"a global batch of {global_batch_size} needs more samples of some length range "
                f"than the data has ({', '.join(strata.names)} tokens: "
                f"{', '.join(map(str, strata.sizes))})"
            )
            remedy = "lower parallel.local_batch_size, or use 'quantile'"
            raise ConfigError("data.sampler", problem, remedy)

    @property
    def mean_length(self) -> float:
        """Mean number of tokens per drawn sample, which differs from the mean over the set."""
        return float(self._strata.mean_lengths @ self._counts / self._counts.sum())

    @property
    def steps_of_pass(self) -> int:
        """Number of full steps until the first stratum is used up."""
        return int((self._strata.sizes // (self._counts * self._groups)).min())

    @property
    def left_over(self) -> tuple[int, ...]:
        """Number of samples of each stratum that are left at the end of a pass."""
        used = self._counts * self._groups * self.steps_of_pass
        return tuple((self._strata.sizes - used).tolist())

    def in_words(self) -> str:
        """Describe the bias and the samples left at the end of a pass, for the run's log."""
        data = self._strata.mean_length
        left = ", ".join(
            f"{count:,} of {name}"
            for count, name in zip(self.left_over, self._strata.names, strict=True)
        )
        return (
            f"the sampler draws {self.mean_length:.2f} tokens per sample on average, "
            f"{self.mean_length / data - 1:+.1%} compared with {data:.2f} in the data. A pass of "
            f"{self.steps_of_pass:,} steps leaves samples that the next pass draws first "
            f"({left} tokens)"
        )

    def global_batch(self, step: int) -> Int64Array:
        """Draw the sample ids of a step, int64 [global_batch_size]. Steps are counted from 1."""
        group = (step - 1) * self._groups + np.arange(self._groups)
        stratum = np.tile(self._stratum, self._groups)
        number = np.tile(self._number, self._groups)
        draw = np.repeat(group, len(self._stratum)) * self._counts[stratum] + number
        round_number, index = np.divmod(draw, self._strata.sizes[stratum])
        return self._strata.draw(stratum, index, round_number, self._seed)


def permute(index: Int64Array, size: int, key: tuple[int, ...]) -> Int64Array:
    """Apply a keyed permutation of 0 .. size - 1 to each element of `index`.

    `index` and the result are int64 [n].

    Like `permute_many`, this function is a Feistel network. It splits a number into two parts and
    changes them in turn, each by a keyed function of the other part. If the result is outside the
    range, it is permuted again until it is inside (cycle walking). The two parts have the same
    number of bits, which is as small as possible, so that at least one result in 4 is inside the
    range.
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
    """Apply keyed permutations to the elements of `index`, each element with its own permutation.

    The two parts of a number are digits in two bases whose product is hardly larger than the size
    (Black and Rogaway, CT-RSA 2002). Nearly all results are therefore inside the range, and
    permutations of different sizes can be computed together.

    Args:
        index: int64 [n], each at least 0 and below the size of its permutation.
        sizes: int64 [n], up to 2**53: the permutation of element i is one of 0 .. sizes[i] - 1.
        numbers: int64 [n], at least 0: number of the permutation of each element. Elements with the
            same number must have the same size.
        key: key of all permutations.
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
    """Apply all rounds of the Feistel network once to numbers of the form left * low + right.

    The digit left is below `high`, and the digit right is below `low`.
    """
    left = value // low
    right = value - left * low
    for key_of_left, key_of_right in round_keys.reshape(-1, 2):
        _add(left, _mix(right ^ tweaks ^ key_of_left), high)
        _add(right, _mix(left ^ tweaks ^ key_of_right), low)
    return left * low + right


def _add(digit: UInt64Array, bits: UInt64Array, base: UInt64Array) -> None:
    """Add random numbers to digits in place, modulo the base.

    The numbers are the upper halves of `bits`, scaled to 0 .. base - 1. `bits` is overwritten.
    """
    bits >>= np.uint64(32)
    bits *= base
    bits >>= np.uint64(32)
    digit += bits
    np.minimum(digit, digit - base, out=digit)  # below `base` the difference wraps around


def _mix(value: UInt64Array) -> UInt64Array:
    """Mix the bits of each value with the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    value = value ^ (value >> np.uint64(30))
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value
