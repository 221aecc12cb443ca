"""The length index that is planned over: of a prepared set, or made up from a length histogram."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.errors import DataError
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.index import MISSING_REMEDY, LengthIndex
from mlperf_bert.data.length_histogram import LengthHistogram

MASKED_SHARE = 0.15  # of a sequence's tokens, as the published preparation masks them
MOST_SAMPLES = 2**28  # the made-up index is held in memory, 7 bytes a sample


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleIndex:
    """What planning needs of N samples; `length_histogram[k]` of them have k tokens."""

    source: str
    vocab_size: int
    lengths: NDArray[np.uint16]  # [N]
    masked_counts: NDArray[np.uint8]  # [N]
    order_by_length: NDArray[Any]  # integer [N]
    length_histogram: Sequence[int]

    @classmethod
    def of_set(cls, directory: Path) -> Self:
        """The index of a prepared set, or of `train/` in its parent. Raises DataError."""
        if not os.path.isdir(directory):
            raise DataError(str(directory), "is not a directory", MISSING_REMEDY)
        train = directory / "train"
        set_dir = train if os.path.isdir(train) else directory
        index = LengthIndex.open(set_dir)
        return cls(
            source=str(set_dir),
            vocab_size=index.manifest.vocab_size,
            lengths=index.lengths,
            masked_counts=index.masked_counts,
            order_by_length=index.order_by_length,
            length_histogram=index.manifest.length_histogram,
        )

    @classmethod
    def of_histogram(cls, histogram: LengthHistogram, source: str, max_predictions: int) -> Self:
        """One sample for every one counted, by length; masked as the published preparation does.

        Raises DataError where there are too many.
        """
        if histogram.num_sequences > MOST_SAMPLES:
            problem = f"counts {histogram.num_sequences:,} sequences, above {MOST_SAMPLES:,}"
            raise DataError(source, problem, "divide all counts by the same number")
        # Halves go to the even neighbour, as in Python's round.
        masked = np.clip(np.rint(MASKED_SHARE * histogram.lengths), 1, max_predictions)
        return cls(
            source=source,
            vocab_size=ModelSection().vocab_size,
            lengths=np.repeat(histogram.lengths.astype(np.uint16), histogram.counts),
            masked_counts=np.repeat(masked.astype(np.uint8), histogram.counts),
            order_by_length=np.arange(histogram.num_sequences, dtype=np.uint32),
            length_histogram=_by_length(histogram),
        )

    @property
    def max_length(self) -> int:
        """Tokens of the longest sample there may be."""
        return len(self.length_histogram) - 1

    @property
    def mean_length(self) -> float:
        """Tokens of a sample on average."""
        total = sum(length * count for length, count in enumerate(self.length_histogram))
        return total / len(self.lengths)


def _by_length(histogram: LengthHistogram) -> list[int]:
    counts = np.zeros(histogram.max_length + 1, dtype=np.int64)
    counts[histogram.lengths] = histogram.counts
    by_length: list[int] = counts.tolist()
    return by_length
