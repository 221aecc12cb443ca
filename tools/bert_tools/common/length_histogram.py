"""Lengths of real pre-training sequences, for tools that have no prepared data set.

Benchmarks, simulations and plans draw lengths from published counts. This module does not import
torch.
"""

from dataclasses import dataclass
from importlib import resources

import numpy as np

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import STORED_MASKING_RATE
from mlperf_bert.data.balance import StepPlanner, planner_of_lengths
from mlperf_bert.data.capacity import StaticShape, plan_shapes
from mlperf_bert.data.index import masked_count_table
from mlperf_bert.data.shards import IntArray
from mlperf_bert.seeds import derive_seed

SHORTEST = 5  # [CLS] word [SEP] word [SEP]
PLANNED_SAMPLES = 2**16  # number of samples from which a run's shapes are planned


@dataclass(frozen=True, kw_only=True)
class LengthHistogram:
    """The number of sequences of each length.

    `counts[i]` sequences have `lengths[i]` tokens. Every count is at least one, and `lengths` is
    ascending. The two arrays are int64 [n].
    """

    lengths: IntArray
    counts: IntArray

    @property
    def num_sequences(self) -> int:
        """Total number of sequences in the histogram."""
        return int(self.counts.sum())

    @property
    def max_length(self) -> int:
        """Length of the longest sequence, in tokens."""
        return int(self.lengths[-1])

    def draw_evenly(self, count: int, seed: int) -> IntArray:
        """Draw `count` lengths by stratified sampling, in random order. Returns int64 [count].

        The sorted lengths of all sequences are divided into `count` ranges of equal size, and one
        length is drawn from each. Therefore the mean of even a few lengths is close to the mean of
        all, which a benchmark with few batches needs.
        """
        generator = np.random.default_rng(seed)
        shares = (np.arange(count) + generator.random(count)) / count
        rank = (generator.permutation(shares) * self.num_sequences).astype(np.int64)
        return self.lengths[np.searchsorted(np.cumsum(self.counts), rank, side="right")]


def wikipedia_lengths() -> LengthHistogram:
    """Return the sequence lengths of BERT's second training phase on Wikipedia (arXiv 2107.02027).

    The longest sequence has 512 tokens.
    """
    file = resources.files(__package__).joinpath("wikipedia_lengths.csv")
    rows = [line for line in file.read_text("utf-8").splitlines() if line[0].isdigit()]
    lengths, counts = np.array([row.split(",") for row in rows], dtype=np.int64).T
    return LengthHistogram(lengths=lengths, counts=counts)


def real_lengths(count: int, max_length: int, seed: int) -> IntArray:
    """Draw published sequence lengths, scaled from at most 512 to at most `max_length` tokens.

    Returns int64 [count].
    """
    published = wikipedia_lengths()
    scaled = published.draw_evenly(count, seed) * max_length
    return np.maximum(-(-scaled // published.max_length), SHORTEST)


def planner_of_run(config: RunConfig) -> StepPlanner:
    """Return a planner of a run's steps, which draws samples with the published lengths."""
    longest, most_masked = config.data.max_seq_length, config.data.max_predictions
    seed = 1 if config.run.seed == "random" else config.run.seed
    count = max(PLANNED_SAMPLES, config.parallel.global_batch_size)
    lengths = real_lengths(count, longest, derive_seed(seed, "planned lengths"))
    stored_masked = masked_count_table(longest, most_masked, STORED_MASKING_RATE)
    return planner_of_lengths(
        config,
        derive_seed(seed, "sampler"),
        lengths.astype(np.uint16),
        stored_masked[lengths],
        np.argsort(lengths, kind="stable"),
        np.bincount(lengths, minlength=longest + 1).tolist(),
    )


def run_shapes(config: RunConfig) -> tuple[StaticShape, ...]:
    """Return the static shapes to which a run with captured steps pads its micro-batches."""
    return shapes_of_planner(config, planner_of_run(config))


def shapes_of_planner(config: RunConfig, planner: StepPlanner) -> tuple[StaticShape, ...]:
    """Return the static shapes of a run with captured steps, whose steps `planner` plans."""
    limits = {"max_seqlen": config.data.max_seq_length, "max_masked": config.data.max_predictions}
    return plan_shapes(planner, config.max_steps, **limits)
