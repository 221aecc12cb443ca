"""Samplers: the samples of a step's global batch, a pure function of (seed, step).

Nothing here knows ranks. Epochs follow each other without a gap: samples left over modulo the
global batch open the next epoch's first batch.

The published kinds draw fixed counts from strata, ranges of length (arXiv 2402.02447), and so may
draw long sequences more often than the data holds them.

The order of an epoch is a keyed permutation, which costs no memory for millions of samples. Any
element's image is computed on its own, so any step of any epoch can be drawn directly.
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
NUM_STRATA = 4  # strata of equal width: 1-128, 129-256, 257-384, 385-512 at 512 tokens

# Samples of each stratum in every 16 or 12 of the global batch, as published.
PUBLISHED_COUNTS = {"stratified_6_3_2_5": (6, 3, 2, 5), "stratified_4_2_2_4": (4, 2, 2, 4)}

Int64Array = NDArray[np.int64]
UInt64Array = NDArray[np.uint64]

# Four rounds give a pseudo-random permutation of a random function; two more are cheap.
_FEISTEL_ROUNDS = 6


class Sampler(Protocol):
    """The interface of all samplers: it draws global batches."""

    def global_batch(self, step: int) -> Int64Array:
        """Sample ids, int64 [global_batch_size], of a step counted from 1.

        Lengths of neighbours vary as in the whole batch, so that any cut of it is fair.
        """


class UniformSampler:
    """A sampler that draws each sample exactly once an epoch, in a new order for each epoch."""

    def __init__(
        self, num_samples: int, global_batch_size: int, seed: int, skip_samples: int = 0
    ) -> None:
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.seed = seed
        self._skip_samples = skip_samples

    def global_batch(self, step: int) -> Int64Array:
        """Sample ids, int64 [global_batch_size], of a step counted from 1."""
        ids = []
        of_epochs = epochs_of(step, self.global_batch_size, self.num_samples, self._skip_samples)
        for epoch, offset in of_epochs:
            ids.append(permute(offset, self.num_samples, (self.seed, epoch)))
        return np.concatenate(ids)


class QuantileSampler:
    """A sampler with equally many draws from each of q equally likely length ranges (quantiles).

    It draws every sample exactly once an epoch, whatever the sizes: unbiased, without counts to
    choose, and the tokens of a batch hardly vary. An epoch is a table of q columns, one for each
    quantile, read row by row; if q does not divide the samples, the quantiles with one more share
    the last row.
    """

    def __init__(
        self,
        order_by_length: NDArray[Any],
        global_batch_size: int,
        seed: int,
        skip_samples: int = 0,
    ) -> None:
        """Draw from `order_by_length`, integer [N], sample ids by length; may be a memory map."""
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
        """Sample ids, int64 [global_batch_size], of a step counted from 1."""
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
    """Quantiles of a sampler: the largest divisor of the global batch that is not above 64."""
    most = min(MOST_QUANTILES, global_batch_size)
    return next(q for q in range(most, 0, -1) if global_batch_size % q == 0)


def epochs_of(
    step: int, global_batch_size: int, num_samples: int, skip_samples: int = 0
) -> list[tuple[int, Int64Array]]:
    """The part of each epoch that a step covers: its number and offsets in it, int64 [n]."""
    start = skip_samples + (step - 1) * global_batch_size
    stop = start + global_batch_size
    parts = []
    for epoch in range(start // num_samples, (stop - 1) // num_samples + 1):
        first = epoch * num_samples
        offsets = np.arange(max(start, first), min(stop, first + num_samples)) - first
        parts.append((epoch, offsets.astype(np.int64)))
    return parts


def _spread(count: int) -> Int64Array:
    """0 .. count - 1 in an order whose neighbours are far apart (van der Corput, base 2)."""
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
    """The sampler of a set, given its ids by length [N] and its counts of k tokens, k = 0 ...

    With `skip_samples` it passes over the first samples of its order, whatever the batches that
    drew them: the rest of an epoch and all later ones stay as they are. The order depends on the
    seed and, for "quantile", on `num_quantiles`; config refuses the published samplers.

    Raises ConfigError if the sampler cannot serve the batch or the set.
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
    """Non-empty strata of a set: start of each in the order by length, and its mean length."""

    order_by_length: NDArray[Any]  # integer [N]: sample ids by length
    starts: Int64Array  # [K]
    sizes: Int64Array  # [K]
    mean_lengths: NDArray[np.float64]  # [K]
    names: tuple[str, ...]  # [K]: "1-128"

    @classmethod
    def of(cls, order_by_length: NDArray[Any], length_histogram: Sequence[int]) -> "Strata":
        """Cut a set into strata of equal width; `length_histogram[k]` samples have k tokens."""
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
        """Tokens of a sample on average."""
        return float(self.sizes @ self.mean_lengths / self.sizes.sum())

    def draw(
        self, stratum: Int64Array, index: Int64Array, round_number: Int64Array, seed: int
    ) -> Int64Array:
        """Sample ids at places `index` of strata, each in its order of a round; all int64 [n]."""
        number = round_number * len(self.sizes) + stratum
        image = permute_many(index, self.sizes[stratum], number, (seed,))
        ids: Int64Array = self.order_by_length[self.starts[stratum] + image].astype(np.int64)
        return ids


class PublishedStrataSampler:
    """A sampler with a fixed count of each stratum in every 16 or 12 samples, as published.

    Each stratum is drawn without replacement, round after round, at its own pace: samples that the
    others have left when the first one ends come first in the next pass. This is biased, so the
    resulting mean length is reported.
    """

    def __init__(
        self, strata: Strata, counts: Sequence[int], global_batch_size: int, seed: int
    ) -> None:
        """Raise ConfigError if the counts do not fit the batch or the sizes of the strata."""
        group = sum(counts)
        if global_batch_size % group:
            problem = f"counts {'/'.join(map(str, counts))} need a multiple of {group} samples"
            remedy = f"the global batch is {global_batch_size}: change it, or use 'quantile'"
            raise ConfigError("data.sampler", problem, remedy)
        if len(strata.sizes) != len(counts):
            problem = f"the data has samples of {', '.join(strata.names)} tokens only"
            remedy = "use 'quantile', which needs no strata"
            raise ConfigError("data.sampler", problem, remedy)
        self._strata = strata
        self._counts = np.array(counts)
        self._groups = global_batch_size // group
        # Places of a group: stratum and number of its draw, spread like the times of draws.
        stratum = np.repeat(np.arange(len(counts)), counts)
        number = np.concatenate([np.arange(count) for count in counts])
        spread = np.argsort((number + 0.5) / self._counts[stratum], kind="stable")
        self._stratum, self._number = stratum[spread], number[spread]
        self._seed = seed
        if not self.steps_of_pass:
            problem = f"a global batch of {global_batch_size} needs more samples of some stratum"
            problem += f" than the data has ({', '.join(strata.names)} tokens: "
            problem += f"{', '.join(map(str, strata.sizes))})"
            raise ConfigError("data.sampler", problem, "lower the batch, or use 'quantile'")

    @property
    def mean_length(self) -> float:
        """Tokens of a drawn sample on average."""
        return float(self._strata.mean_lengths @ self._counts / self._counts.sum())

    @property
    def steps_of_pass(self) -> int:
        """Full steps until the first stratum ends."""
        return int((self._strata.sizes // (self._counts * self._groups)).min())

    @property
    def left_over(self) -> tuple[int, ...]:
        """Samples of each stratum that a pass has left."""
        used = self._counts * self._groups * self.steps_of_pass
        return tuple((self._strata.sizes - used).tolist())

    def in_words(self) -> str:
        """Bias and left-overs, for the run's log."""
        data = self._strata.mean_length
        left = ", ".join(
            f"{count:,} of {name}"
            for count, name in zip(self.left_over, self._strata.names, strict=True)
        )
        return (
            f"mean length drawn {self.mean_length:.2f}, {self.mean_length / data - 1:+.1%} against "
            f"the data's {data:.2f}; a pass of {self.steps_of_pass:,} steps leaves {left} tokens, "
            "which come first in the next"
        )

    def global_batch(self, step: int) -> Int64Array:
        """Sample ids, int64 [global_batch_size], of a step counted from 1."""
        group = (step - 1) * self._groups + np.arange(self._groups)
        stratum = np.tile(self._stratum, self._groups)
        number = np.tile(self._number, self._groups)
        draw = np.repeat(group, len(self._stratum)) * self._counts[stratum] + number
        round_number, index = np.divmod(draw, self._strata.sizes[stratum])
        return self._strata.draw(stratum, index, round_number, self._seed)


def permute(index: Int64Array, size: int, key: tuple[int, ...]) -> Int64Array:
    """Images of `index` under a keyed permutation of 0 .. size - 1 (both int64 [n]).

    It is a Feistel network, like `permute_many`: two parts of a number, each changed in turn by a
    keyed function of the other. An image outside the range is permuted again until it falls inside
    (cycle walking). The parts are halves of the smallest even number of bits that holds the size,
    so at least one image in 4 falls inside.
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
    2002), so that groups of any sizes are permuted together and nearly all images fall inside. All
    arrays are int64 [n]: `index` from 0 and below its size, `sizes` at most 2**53, `numbers` from
    0; equal numbers have equal sizes.
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
