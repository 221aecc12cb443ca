"""Synthetic samples of real lengths, and prepared sets of them, which need no text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_tools.common.length_histogram import (
    masked_counts_of,
)
from mlperf_bert.config.sections import STORED_MASKING_RATE
from mlperf_bert.data.index import (
    Manifest,
    ShardEntry,
    ShardSettings,
    write_index,
)
from mlperf_bert.data.shards import IntArray, Samples, ShardArrays
from mlperf_bert.files import make_directory
from mlperf_bert.prepare.build import write_shard

DISTINCT_SAMPLES = 4096  # drawing more takes long; further ones repeat these
VOCAB_SIZE = 30522
DIGEST = "0" * 64  # digests of vocabulary and text, which do not exist


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


def set_settings(
    max_seq_length: int, max_predictions: int, seed: int, dupe_factor: int = 1
) -> ShardSettings:
    """Settings of a synthetic set."""
    return ShardSettings(
        vocabulary_sha256=DIGEST,
        max_seq_length=max_seq_length,
        max_predictions=max_predictions,
        seed=seed,
        dupe_factor=dupe_factor,
    )


def as_examples(samples: Samples, dtype: str = "<u2", repeats: int = 1) -> ShardArrays:
    """The samples as a shard holds them, `repeats` times; `dtype` is that of the words."""

    def offsets(counts: IntArray) -> NDArray[np.int64]:
        return np.concatenate(([0], np.cumsum(np.tile(counts, repeats))))

    return ShardArrays(
        input_ids=np.tile(samples.input_ids.astype(dtype), repeats),
        offsets=offsets(samples.lengths),
        segment_b_start=np.tile(samples.segment_b_start.astype(np.uint16), repeats),
        masked_lm_positions=np.tile(samples.masked_positions.astype(np.uint16), repeats),
        masked_lm_ids=np.tile(samples.masked_ids.astype(dtype), repeats),
        masked_lm_offsets=offsets(samples.masked_counts),
        next_sentence_label=np.tile(samples.next_sentence_label.astype(np.uint8), repeats),
    )


def write_set(
    set_dir: Path, shards: Sequence[ShardArrays], settings: ShardSettings, vocab_size: int
) -> Manifest:
    """Write the shards and their index. Raises DataError if a file cannot be written."""
    make_directory(set_dir / "shards")
    entries = []
    for number, examples in enumerate(shards):
        path = set_dir / "shards" / f"part-{number}.hdf5"
        write_shard(path, examples, source_name="made up", source_sha256=DIGEST, settings=settings)
        entries.append(ShardEntry.of(path))
    manifest = Manifest(
        num_samples=sum(entry.num_samples for entry in entries),
        vocab_size=vocab_size,
        vocabulary_sha256=DIGEST,
        pad_id=0,
        unk_id=1,
        cls_id=2,
        sep_id=3,
        mask_id=4,
        max_seq_length=settings.max_seq_length,
        max_predictions=settings.max_predictions,
        seed=settings.seed,
        dupe_factor=settings.dupe_factor,
        shards=tuple(entries),
    )
    offsets = ([each.offsets for each in shards], [each.masked_lm_offsets for each in shards])
    counts = (np.concatenate([*map(np.diff, each)]).astype(np.uint16) for each in offsets)
    return write_index(set_dir, manifest, *counts)
