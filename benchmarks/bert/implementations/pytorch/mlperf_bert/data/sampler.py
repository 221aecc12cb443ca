"""Which samples make up the global batch of a step: a pure function of (seed, step).

Nothing here knows ranks. Epochs follow each other without a gap: what an epoch has left modulo the
global batch opens the first batch of the next one.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.data.permutation import Int64Array, permute, permute_many

MOST_QUANTILES = 64


class Sampler(Protocol):
    """Draws global batches."""

    def global_batch(self, step: int) -> Int64Array:
        """Sample ids, int64 [global_batch_size], of a step counted from 1.

        Neighbours in the batch differ in length as the batch does, so that any cut is a fair one.
        """


class UniformSampler:
    """Every sample exactly once an epoch, in an order drawn anew for each epoch."""

    def __init__(self, num_samples: int, global_batch_size: int, seed: int) -> None:
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.seed = seed

    def global_batch(self, step: int) -> Int64Array:
        """Sample ids, int64 [global_batch_size], of a step counted from 1."""
        ids = []
        for epoch, offset in epochs_of(step, self.global_batch_size, self.num_samples):
            ids.append(permute(offset, self.num_samples, (self.seed, epoch)))
        return np.concatenate(ids)


class QuantileSampler:
    """The same number of draws from each of q equally likely ranges of length (quantiles).

    Every sample exactly once an epoch, whatever the sizes: unbiased, no counts to pick, and the
    tokens of a batch hardly vary. An epoch is a table of q columns, one a quantile, read row by
    row; where q does not divide the samples, the quantiles with one more share the last row.
    """

    def __init__(
        self,
        order_by_length: NDArray[Any],
        global_batch_size: int,
        num_quantiles: int,
        seed: int,
    ) -> None:
        """Draw from `order_by_length`, integer [N], sample ids by length; may be a memory map.

        Raises ConfigError where the quantiles do not divide the global batch.
        """
        if num_quantiles < 1 or global_batch_size % num_quantiles:
            raise ConfigError(
                "data.quantiles",
                f"{num_quantiles} does not divide the global batch of {global_batch_size}",
                "use a divisor of it, or 'auto'",
            )
        self._order = order_by_length
        self._global_batch_size = global_batch_size
        self._seed = seed
        numbers = np.arange(num_quantiles + 1, dtype=np.int64)
        self._starts = numbers * len(order_by_length) // num_quantiles
        self._sizes = np.diff(self._starts)
        self._columns = _spread(num_quantiles)
        self._larger = np.flatnonzero(self._sizes > len(order_by_length) // num_quantiles)

    def global_batch(self, step: int) -> Int64Array:
        """Sample ids, int64 [global_batch_size], of a step counted from 1."""
        num_samples, num_quantiles = len(self._order), len(self._sizes)
        ids = []
        for epoch, offset in epochs_of(step, self._global_batch_size, num_samples):
            row, column = np.divmod(offset, num_quantiles)
            quantile = self._columns[column]
            is_last = row == num_samples // num_quantiles
            quantile[is_last] = self._larger[column[is_last]]
            image = permute_many(row, self._sizes[quantile], quantile, (self._seed, epoch))
            ids.append(self._order[self._starts[quantile] + image].astype(np.int64))
        return np.concatenate(ids)


def default_quantiles(global_batch_size: int) -> int:
    """The largest divisor of the global batch that is not above 64."""
    most = min(MOST_QUANTILES, global_batch_size)
    return next(q for q in range(most, 0, -1) if global_batch_size % q == 0)


def epochs_of(step: int, global_batch_size: int, num_samples: int) -> list[tuple[int, Int64Array]]:
    """The part of each epoch that a step covers: its number and offsets in it, int64 [n]."""
    start = (step - 1) * global_batch_size
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
