"""How long real pre-training sequences are: published counts, and lengths drawn from them.

For benchmarks, simulations and plans that must not depend on a prepared set. No torch.
"""

from dataclasses import dataclass
from functools import cached_property
from importlib import resources

import numpy as np

from mlperf_bert.data.shards import IntArray


@dataclass(frozen=True, kw_only=True)
class LengthHistogram:
    """`counts[i]` sequences, at least one, have `lengths[i]` tokens; both int64 [n], ascending."""

    lengths: IntArray
    counts: IntArray

    @property
    def num_sequences(self) -> int:
        """Sequences counted."""
        return int(self.counts.sum())

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths[-1])

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence on average."""
        return float(self.lengths @ self.counts / self.num_sequences)

    def draw_evenly(self, count: int, seed: int) -> IntArray:
        """One length from each of `count` equally likely ranges, int64 [count], in random order.

        Few of them already have nearly the mean of all: what a benchmark of few batches needs.
        """
        generator = np.random.default_rng(seed)
        shares = (np.arange(count) + generator.random(count)) / count
        rank = (generator.permutation(shares) * self.num_sequences).astype(np.int64)
        return self.lengths[np.searchsorted(self._ends, rank, side="right")]

    @cached_property
    def _ends(self) -> IntArray:
        return np.cumsum(self.counts)


def wikipedia_lengths() -> LengthHistogram:
    """The lengths of BERT's second phase on Wikipedia, at most 512 tokens (arXiv 2107.02027)."""
    text = resources.files("mlperf_bert.data").joinpath("wikipedia_lengths.csv").read_text("utf-8")
    rows = [line for line in text.splitlines() if line[0].isdigit()]
    table = np.array([row.split(",") for row in rows], dtype=np.int64)
    return LengthHistogram(lengths=table[:, 0], counts=table[:, 1])
