"""The length index to plan over: of a prepared set, or made from a length histogram."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.config.sections import MAX_PREDICTIONS, STORED_MASKING_RATE, ModelSection
from mlperf_bert.data.index import MISSING_REMEDY, LengthIndex, MaskedCounts
from mlperf_bert.data.length_histogram import (
    LONGEST,
    LengthHistogram,
    read_histogram,
    wikipedia_lengths,
)

MOST_SAMPLES = 2**28  # the made-up index is held in memory, 8 bytes a sample


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleIndex:
    """Lengths of N samples, as planning needs them; `length_histogram[k]` have k tokens."""

    source: str
    vocab_size: int
    lengths: NDArray[np.uint16]  # [N]
    masked_counts: MaskedCounts  # [N]
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
        """One sample for each one counted, by length; masked as in the published preparation.

        Raises DataError if there are too many.
        """
        if histogram.num_sequences > MOST_SAMPLES:
            problem = f"counts {histogram.num_sequences:,} sequences, above {MOST_SAMPLES:,}"
            raise DataError(source, problem, "divide all counts by the same number")
        # Halves go to the even neighbour, as in Python's round.
        masked = np.clip(np.rint(STORED_MASKING_RATE * histogram.lengths), 1, max_predictions)
        return cls(
            source=source,
            vocab_size=ModelSection().vocab_size,
            lengths=np.repeat(histogram.lengths.astype(np.uint16), histogram.counts),
            masked_counts=np.repeat(masked.astype(np.uint16), histogram.counts),
            order_by_length=np.arange(histogram.num_sequences, dtype=np.uint32),
            length_histogram=np.bincount(histogram.lengths, histogram.counts).astype(int).tolist(),
        )

    @property
    def max_length(self) -> int:
        """Tokens of the longest possible sample."""
        return len(self.length_histogram) - 1

    @property
    def mean_length(self) -> float:
        """Mean tokens per sample."""
        total = sum(length * count for length, count in enumerate(self.length_histogram))
        return total / len(self.lengths)


@cache
def wikipedia_index(max_predictions: int = MAX_PREDICTIONS) -> SampleIndex:
    """One sample for each of the published lengths of Wikipedia."""
    histogram = wikipedia_lengths()
    return SampleIndex.of_histogram(histogram, "Wikipedia's lengths", max_predictions)


def asked_index(args: argparse.Namespace) -> SampleIndex:
    """The index that --data, --histogram and --max-predictions ask for. Raises ConfigError."""
    most, given = vars(args).get("max_predictions"), args.histogram
    if vars(args).get("data") is not None:
        if most is not None:
            remedy = "leave it out: the set says how many positions are masked"
            raise ConfigError("--max-predictions", "does not go with --data", remedy)
        return SampleIndex.of_set(args.data)
    most = MAX_PREDICTIONS if most is None else most
    if not 1 <= most <= LONGEST:
        raise ConfigError("--max-predictions", f"is {most}", f"set it within 1 .. {LONGEST}")
    if given is None:
        return wikipedia_index(most)
    return SampleIndex.of_histogram(read_histogram(given), str(given), most)
