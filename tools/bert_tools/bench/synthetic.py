"""Synthetic samples of real lengths, which need no text."""

import numpy as np

from bert_tools.common.length_histogram import masked_counts_of
from mlperf_bert.config.sections import STORED_MASKING_RATE
from mlperf_bert.data.shards import IntArray, Samples


def synthetic_samples(
    lengths: IntArray,
    *,
    vocab_size: int,
    max_predictions: int,
    seed: int,
    masking_rate: float = STORED_MASKING_RATE,
) -> Samples:
    """Samples of these lengths; all else is drawn from the seed.

    Words are uniform over 1 .. vocab_size - 1 (0 is padding, which some models treat specially).
    Segments, and number and choice of masked positions, are as in `prepare`.

    Args:
        lengths: int64 [n], each at least SHORTEST.
        vocab_size: words of the vocabulary, at least 2.
        max_predictions: most masked positions of a sample.
        seed: seed of all draws.
        masking_rate: share of a sample's tokens that are masked.
    """
    generator = np.random.default_rng(seed)
    segment_b_start = generator.integers(3, lengths - 1)
    masked_counts = masked_counts_of(lengths, max_predictions, masking_rate)
    masked_positions = []
    for length, start, count in zip(lengths, segment_b_start, masked_counts, strict=True):
        words = np.delete(np.arange(1, length - 1), start - 2)  # not [CLS], not the [SEP]s
        masked_positions.append(np.sort(generator.choice(words, size=count, replace=False)))
    return Samples(
        input_ids=generator.integers(1, vocab_size, int(lengths.sum())),
        lengths=lengths,
        segment_b_start=segment_b_start,
        masked_positions=np.concatenate(masked_positions),
        masked_ids=generator.integers(1, vocab_size, int(masked_counts.sum())),
        masked_counts=masked_counts,
        next_sentence_label=generator.integers(0, 2, len(lengths)),
    )
