"""Samples of real lengths with made-up words, shaped as preparation would shape them."""

import numpy as np

from mlperf_bert.data.shards import IntArray, Samples


def synthetic_samples(
    lengths: IntArray, *, vocab_size: int, max_predictions: int, seed: int
) -> Samples:
    """Samples of these lengths, all else drawn from the seed.

    Words are uniform over 1 .. vocab_size - 1 (0 is padding, which some models treat apart). The
    two segments, and how many positions are masked and which may be, are as `prepare` has them.

    Args:
        lengths: int64 [n], each at least SHORTEST.
        vocab_size: words of the vocabulary, at least 2.
        max_predictions: masked positions of a sample at most.
        seed: of every draw.
    """
    generator = np.random.default_rng(seed)
    segment_b_start = generator.integers(3, lengths - 1)
    masked_counts = np.clip(np.rint(lengths * 0.15).astype(np.int64), 1, max_predictions)
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
