"""Plans training steps from the sample lengths of a prepared set or of a published histogram."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bert_tools.common.length_histogram import LengthHistogram, wikipedia_lengths
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import MAX_PREDICTIONS, STORED_MASKING_RATE, ModelSection
from mlperf_bert.data.balance import StepPlan, StepPlanner, planner_of_lengths
from mlperf_bert.data.index import MISSING_REMEDY, LengthIndex, MaskedCounts, masked_count_table
from mlperf_bert.data.token_packets import gathered_bytes
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.vocabulary.word_pieces import token_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleIndex:
    """The lengths of N samples, from which steps are planned.

    `length_histogram[k]` is the number of samples with k tokens.
    """

    source: str
    vocab_size: int
    lengths: NDArray[np.uint16]  # [N]
    masked_counts: MaskedCounts  # [N]
    order_by_length: NDArray[Any]  # integer [N]
    length_histogram: Sequence[int]

    @classmethod
    def of_set(cls, directory: Path) -> Self:
        """Open the index of a prepared set, or of the set `train/` inside `directory`.

        Raises DataError if the index cannot be read.
        """
        if not os.path.isdir(directory):
            raise DataError(str(directory), "no such directory", MISSING_REMEDY)
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
    def of_histogram(cls, histogram: LengthHistogram, source: str) -> Self:
        """Create an index of samples whose lengths follow a histogram.

        The samples are sorted by length. Their numbers of masked tokens follow the published data.
        """
        table = masked_count_table(histogram.max_length, MAX_PREDICTIONS, STORED_MASKING_RATE)
        return cls(
            source=source,
            vocab_size=ModelSection().vocab_size,
            lengths=np.repeat(histogram.lengths.astype(np.uint16), histogram.counts),
            masked_counts=np.repeat(table[histogram.lengths], histogram.counts),
            order_by_length=np.arange(histogram.num_sequences, dtype=np.uint32),
            length_histogram=np.bincount(histogram.lengths, histogram.counts).astype(int).tolist(),
        )

    @property
    def max_length(self) -> int:
        """Return the maximum length of a sample in this index, in tokens."""
        return len(self.length_histogram) - 1

    @property
    def mean_length(self) -> float:
        """Return the mean number of tokens per sample."""
        total = sum(length * count for length, count in enumerate(self.length_histogram))
        return total / len(self.lengths)

    def planner(self, config: RunConfig) -> StepPlanner:
        """Return a planner of the config's steps, which draws from these samples with seed 0.

        Raises ConfigError if a batch has more sequences than there are samples, or if the sampler
        does not support the batch.
        """
        batch = config.parallel.global_batch_size
        if batch > len(self.lengths):
            samples = f"{len(self.lengths):,} samples of {self.source}"
            problem = f"results in a global batch of {batch:,}, but there are only {samples}"
            remedy = "lower local_batch_size or the number of ranks"
            raise ConfigError("parallel.local_batch_size", problem, remedy)
        return planner_of_lengths(
            config,
            0,
            self.lengths,
            self.masked_counts,
            self.order_by_length,
            self.length_histogram,
        )

    def exchanged_bytes(self, config: RunConfig, plan: StepPlan) -> int:
        """Return the number of bytes that a rank receives from other ranks in a step.

        The count includes only real tokens and only the first group of ranks that exchange samples.
        """
        parallel = config.parallel
        groups = {"exchange_global": parallel.world_size, "exchange_local": parallel.ranks_per_node}
        if config.data.balance not in groups:
            return 0
        drawn = plan.drawn_ids[: groups[config.data.balance]]
        token = token_dtype(self.vocab_size)
        return gathered_bytes(self.lengths[drawn], self.masked_counts[drawn], token)


@cache
def wikipedia_index() -> SampleIndex:
    """Return an index with the published sample lengths of the Wikipedia data set."""
    return SampleIndex.of_histogram(wikipedia_lengths(), "Wikipedia's lengths")
