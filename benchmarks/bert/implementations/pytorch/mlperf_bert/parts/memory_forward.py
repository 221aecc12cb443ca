"""Sizes of one forward, which its memory goes by."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np

from mlperf_bert.data.packing import best_fit_decreasing, cut_by_ratio
from mlperf_bert.data.shards import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedAttention:
    """Slots and probabilities of attention that pads, summed over its groups or rows.

    `squares`: query slots times key slots; `largest`: of one group. `last_*` are of the last layer,
    which has fewer queries. A group of one sequence saves views of all groups' keys and values:
    `kept_by_views` are the slots that are saved on its account.
    """

    slots: int
    squares: int
    last_slots: int
    last_squares: int
    largest: int
    kept_by_views: int

    @classmethod
    def grouped(cls, lengths: IntArray, queries: IntArray) -> Self:
        """Sequences of similar length padded together (`model/padded_slots.py`)."""
        order = np.argsort(-lengths, kind="stable")
        bounds = cut_by_ratio(lengths[order])
        sizes = []
        for start, end in pairwise(bounds):
            own = order[start:end]
            sizes.append((len(own), int(lengths[own].max()), int(queries[own].max())))
        return cls._of(sizes)

    @classmethod
    def packed(cls, lengths: IntArray, queries: IntArray, longest: int) -> Self:
        """Several sequences in rows of `longest` slots."""
        row = best_fit_decreasing(lengths, longest)
        most = int(np.bincount(row, weights=queries).max())
        return cls._of([(int(row.max()) + 1, longest, most)])

    @classmethod
    def one_by_one(cls, lengths: IntArray, queries: IntArray) -> Self:
        """Nothing padded."""
        pairs = zip(lengths.tolist(), queries.tolist(), strict=True)
        return cls._of([(1, length, count) for length, count in pairs])

    @classmethod
    def _of(cls, sizes: list[tuple[int, int, int]]) -> Self:
        """Of groups: how many sequences, slots of each for keys and for queries of the last."""
        slots = sum(count * keys for count, keys, _ in sizes)
        alone = sum(keys for count, keys, _ in sizes if count == 1)
        return cls(
            slots=slots,
            kept_by_views=slots - alone if alone else 0,
            squares=sum(count * keys**2 for count, keys, _ in sizes),
            last_slots=sum(count * queries for count, _, queries in sizes),
            last_squares=sum(count * keys * queries for count, keys, queries in sizes),
            largest=max(count * keys**2 for count, keys, _ in sizes),
        )

    def times(self, factor: float) -> Self:
        """As if there were so many times as many sequences."""
        names = self.__dataclass_fields__
        return replace(self, **{name: round(factor * getattr(self, name)) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """Sizes of one forward: the batch as the model gets it, padding included.

    `longest`: tokens of a sequence at most. `mean_length`: of the sequences that the batch is drawn
    from, where `tokens` are more than their mean, so that the largest draw fits. `padded` is there
    where attention pads.
    """

    sequences: int
    tokens: int
    masked: int
    longest: int
    mean_length: float | None = None
    padded: PaddedAttention | None = None

    def of_batch(self, sequences: int) -> Self:
        """The same with another number of sequences.

        What is above the mean goes with the square root of their number, as a sum's deviation does.
        """
        factor = sequences / self.sequences
        tokens = factor * self.tokens
        if self.mean_length is not None:
            mean = min(self.mean_length * sequences, tokens)
            tokens = mean + (tokens - mean) / factor**0.5
        share = tokens / self.tokens
        return replace(
            self,
            sequences=sequences,
            tokens=round(tokens),
            masked=round(share * self.masked),
            padded=None if self.padded is None else self.padded.times(share),
        )
