"""Small prepared sets of made-up samples, any number of shards, written without text."""

from dataclasses import fields

import numpy as np
import torch

from bert_tools.bench.training_run import synthetic_samples
from bert_tools.common.length_histogram import SHORTEST
from mlperf_bert.data.batch import IGNORED, UnpaddedBatch
from mlperf_bert.data.index import Manifest, ShardEntry, ShardSettings, write_index
from mlperf_bert.data.shards import ShardArrays
from mlperf_bert.prepare.build import write_shard

MAX_LENGTH = 40
MAX_PREDICTIONS = 6
VOCAB_SIZES = {"<u2": 1000, "<u4": 100_000}  # by the dtype of the tokens


def manifest_of(shards, **changes):
    """The manifest of a set of made-up samples, without what `write_index` fills in."""
    ids = {name: n for n, name in enumerate(("pad_id", "unk_id", "cls_id", "sep_id", "mask_id"))}
    same = {"max_seq_length": MAX_LENGTH, "max_predictions": MAX_PREDICTIONS, "dupe_factor": 1}
    num_samples = sum(entry.num_samples for entry in shards)
    known = {"num_samples": num_samples, "vocabulary_sha256": "0" * 64, "seed": 1, "shards": shards}
    return Manifest(**{"vocab_size": 1000, **ids, **same, **known, **changes})


def as_examples(samples, dtype):
    """The samples as a shard holds them; `dtype` is that of the words."""
    return ShardArrays(
        input_ids=samples.input_ids.astype(dtype),
        offsets=np.concatenate(([0], np.cumsum(samples.lengths))),
        segment_b_start=samples.segment_b_start.astype(np.uint16),
        masked_lm_positions=samples.masked_positions.astype(np.uint16),
        masked_lm_ids=samples.masked_ids.astype(dtype),
        masked_lm_offsets=np.concatenate(([0], np.cumsum(samples.masked_counts))),
        next_sentence_label=samples.next_sentence_label.astype(np.uint8),
    )


def write_set(set_dir, shards, seed):
    """Write shards of (samples, dtype of the tokens) and their index."""
    limits = {"max_seq_length": MAX_LENGTH, "max_predictions": MAX_PREDICTIONS}
    settings = ShardSettings(vocabulary_sha256="0" * 64, dupe_factor=1, seed=seed, **limits)
    (set_dir / "shards").mkdir(parents=True)
    made, entries = [], []
    for number, (num_samples, dtype) in enumerate(shards):
        generator = np.random.default_rng((seed, number))
        samples = synthetic_samples(
            generator.integers(SHORTEST, MAX_LENGTH + 1, num_samples),
            vocab_size=VOCAB_SIZES[dtype],
            max_predictions=MAX_PREDICTIONS,
            seed=seed + number,
        )
        path = set_dir / "shards" / f"part-{number}.hdf5"
        examples = as_examples(samples, dtype)
        write_shard(
            path, examples, source_name="made up", source_sha256="0" * 64, settings=settings
        )
        made.append(samples)
        entries.append(ShardEntry.of(path))
    vocab_size = max(VOCAB_SIZES[dtype] for _, dtype in shards)
    manifest = manifest_of(tuple(entries), vocab_size=vocab_size, seed=seed)
    lengths = np.concatenate([samples.lengths for samples in made])
    masked_counts = np.concatenate([samples.masked_counts for samples in made])
    return write_index(
        set_dir, manifest, lengths.astype(np.uint16), masked_counts.astype(np.uint16)
    )


def originals(batch):
    """The tokens of a batch before masking; it may be padded."""
    is_used = batch.labels != IGNORED
    found = batch.input_ids.clone()
    found[batch.masked_token_index[is_used]] = batch.labels[is_used]
    return found


def assert_same_batch(batch, expected):
    """Equal dtypes, shapes and contents."""
    for field in fields(UnpaddedBatch):
        value, wanted = getattr(batch, field.name), getattr(expected, field.name)
        if not isinstance(wanted, torch.Tensor):
            assert value == wanted
        else:
            assert value.dtype == wanted.dtype and value.shape == wanted.shape
            assert torch.equal(value, wanted), field.name
