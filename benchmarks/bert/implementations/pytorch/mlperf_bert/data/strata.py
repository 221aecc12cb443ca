"""Samplers that draw from strata, ranges of length with a share of their own (arXiv 2402.02447).

Two kinds: exact shares, so that all strata end together, and the published fixed counts, which
draw long sequences more often than the data holds them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.data.permutation import Int64Array, permute_many
from mlperf_bert.data.sampler import epochs_of

NUM_STRATA = 4  # of equal width: 1-128, 129-256, 257-384, 385-512 at 512 tokens

# Samples of each stratum in so many of the global batch (16 and 12), as published.
PUBLISHED_COUNTS = {"strata_6_3_2_5": (6, 3, 2, 5), "strata_4_2_2_4": (4, 2, 2, 4)}


@dataclass(frozen=True, slots=True)
class Strata:
    """Non-empty strata of a set: where each begins in the order by length, and its mean length."""

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


class StrataSampler:
    """Draws from every stratum by its exact share; every sample exactly once an epoch.

    Draw k of n of a stratum falls at time (k + 1/2) / n of the epoch, and a step takes the next
    draws of all strata in the order of time: rounding errors of one step are made good by the next.
    """

    def __init__(self, strata: Strata, global_batch_size: int, seed: int) -> None:
        """Raise ConfigError where a batch is too small to hold one sample of each stratum."""
        self._strata = strata
        self._global_batch_size = global_batch_size
        self._seed = seed
        smallest = int(strata.sizes.argmin())
        share = strata.sizes[smallest] / strata.sizes.sum()
        if share * global_batch_size < 1:
            raise ConfigError(
                "data.sampler",
                f"strata need a global batch of {int(np.ceil(1 / share))}, as {share:.1%} of the "
                f"samples have {strata.names[smallest]} tokens; it is {global_batch_size}",
                "use 'quantile', which any batch can represent, or a larger batch",
            )

    def global_batch(self, step: int) -> Int64Array:
        """Sample ids, int64 [global_batch_size], of a step counted from 1."""
        strata, ids = self._strata, []
        num_samples = int(strata.sizes.sum())
        for epoch, offset in epochs_of(step, self._global_batch_size, num_samples):
            before = self._counts(int(offset[0]))
            after = self._counts(int(offset[-1]) + 1)
            index = np.concatenate([np.arange(*span) for span in zip(before, after, strict=True)])
            stratum = np.repeat(np.arange(len(before)), np.subtract(after, before))
            in_time = np.argsort((index + 0.5) / strata.sizes[stratum], kind="stable")
            index, stratum = index[in_time], stratum[in_time]
            ids.append(strata.draw(stratum, index, np.full_like(index, epoch), self._seed))
        return np.concatenate(ids)

    def _counts(self, draws: int) -> list[int]:
        """How many of each stratum are among the first `draws` of an epoch."""
        sizes = self._strata.sizes.tolist()
        total, count = sum(sizes), len(sizes)
        # At least so many: rounding moves the time after `draws` by half a draw a stratum.
        counts = [max(0, (size * (2 * draws - count) + total) // (2 * total)) for size in sizes]
        for _ in range(draws - sum(counts)):
            due = [
                (2 * taken + 1) / size if taken < size else np.inf
                for taken, size in zip(counts, sizes, strict=True)
            ]
            counts[int(np.argmin(due))] += 1
        return counts


class PublishedStrataSampler:
    """A fixed number of samples of each stratum in every so many of the batch, as published.

    Each stratum is drawn without replacement, round after round, at its own pace: what the others
    have left over when the first of them ends comes first in what follows. Biased, so the mean
    length it induces is reported.
    """

    def __init__(
        self, strata: Strata, counts: Sequence[int], global_batch_size: int, seed: int
    ) -> None:
        """Raise ConfigError where the counts do not fit the batch or the sizes of the strata."""
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
        # The places of a group: stratum, and which of its draws; spread as the times of draws are.
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
