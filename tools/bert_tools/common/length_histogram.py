"""Lengths of real pre-training sequences: published counts, drawn lengths, shapes.

For benchmarks, simulations and plans that must not depend on a prepared set. No torch.
"""

from dataclasses import dataclass
from importlib import resources

import numpy as np

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import STORED_MASKING_RATE
from mlperf_bert.data.balance import planner_of_lengths
from mlperf_bert.data.capacity import StaticShape, plan_shapes
from mlperf_bert.data.shards import IntArray
from mlperf_bert.seeds import derive_seed

SHORTEST = 5  # [CLS] word [SEP] word [SEP]
PLANNED_SAMPLES = 2**16  # steps from which a run's shapes are planned


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

    def draw_evenly(self, count: int, seed: int) -> IntArray:
        """One length from each of `count` equally likely ranges, int64 [count], in random order.

        A few of them already have nearly the mean of all, as a benchmark of few batches needs.
        """
        generator = np.random.default_rng(seed)
        shares = (np.arange(count) + generator.random(count)) / count
        rank = (generator.permutation(shares) * self.num_sequences).astype(np.int64)
        return self.lengths[np.searchsorted(np.cumsum(self.counts), rank, side="right")]


def wikipedia_lengths() -> LengthHistogram:
    """The lengths of BERT's second phase on Wikipedia, at most 512 tokens (arXiv 2107.02027)."""
    file = resources.files(__package__).joinpath("wikipedia_lengths.csv")
    rows = [line for line in file.read_text("utf-8").splitlines() if line[0].isdigit()]
    lengths, counts = np.array([row.split(",") for row in rows], dtype=np.int64).T
    return LengthHistogram(lengths=lengths, counts=counts)


def real_lengths(count: int, max_length: int, seed: int) -> IntArray:
    """Published lengths, int64 [count], scaled to `max_length`."""
    published = wikipedia_lengths()
    scaled = published.draw_evenly(count, seed) * max_length
    return np.maximum(-(-scaled // published.max_length), SHORTEST)


def masked_counts_of(lengths: IntArray, most: int, rate: float = STORED_MASKING_RATE) -> IntArray:
    """Masked positions of sequences of these lengths, a share of their tokens, at most `most`."""
    counts: IntArray = np.clip(np.rint(rate * lengths), 1, most).astype(np.int64)
    return counts


def run_shapes(config: RunConfig) -> tuple[StaticShape, ...]:
    """The shapes to which a captured run of `config` pads micro-batches, planned as in a run."""
    longest, most_masked = config.data.max_seq_length, config.data.max_predictions
    seed = 1 if config.run.seed == "random" else config.run.seed
    count = max(PLANNED_SAMPLES, config.parallel.global_batch_size)
    lengths = real_lengths(count, longest, derive_seed(seed, "planned lengths"))
    planner = planner_of_lengths(
        config,
        seed,
        lengths.astype(np.uint16),
        masked_counts_of(lengths, most_masked, config.data.masking_rate).astype(np.uint16),
        np.argsort(lengths, kind="stable"),
        np.bincount(lengths, minlength=longest + 1).tolist(),
    )
    return plan_shapes(planner, config.max_steps, max_seqlen=longest, max_masked=most_masked)
