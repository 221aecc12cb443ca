"""Small prepared sets of made-up samples, any number of shards, written without text."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert_tools.bench import synthetic
from bert_tools.bench.synthetic import as_examples, set_settings, synthetic_samples
from bert_tools.common.length_histogram import SHORTEST
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.index import Manifest, ShardEntry, ShardSettings

MAX_LENGTH = 40
MAX_PREDICTIONS = 6
VOCAB_SIZES = {"<u2": 1000, "<u4": 100_000}  # by the dtype of the tokens


def settings_of(**changes: Any) -> ShardSettings:
    """The settings of these sets' shards."""
    same = {"dupe_factor": 1, "split_sentences": False, "pick_eval": None, "seed": 1}
    limits = {"max_seq_length": MAX_LENGTH, "max_predictions": MAX_PREDICTIONS}
    return ShardSettings(**{"vocabulary_sha256": "0" * 64, **limits, **same, **changes})


def manifest_of(shards: tuple[ShardEntry, ...], **changes: Any) -> Manifest:
    """The manifest of a set of made-up samples, without what `write_index` fills in."""
    ids = {name: n for n, name in enumerate(("pad_id", "unk_id", "cls_id", "sep_id", "mask_id"))}
    same = {"max_seq_length": MAX_LENGTH, "max_predictions": MAX_PREDICTIONS, "dupe_factor": 1}
    num_samples = sum(entry.num_samples for entry in shards)
    known = {"num_samples": num_samples, "vocabulary_sha256": "0" * 64, "seed": 1, "shards": shards}
    return Manifest(**{"vocab_size": 1000, **ids, **same, **known, **changes})


def write_set(set_dir: Path, shards: Sequence[tuple[int, str]], seed: int) -> Manifest:
    """Write shards of (samples, dtype of the tokens) and their index."""
    made = []
    for number, (num_samples, dtype) in enumerate(shards):
        generator = np.random.default_rng((seed, number))
        samples = synthetic_samples(
            generator.integers(SHORTEST, MAX_LENGTH + 1, num_samples),
            vocab_size=VOCAB_SIZES[dtype],
            max_predictions=MAX_PREDICTIONS,
            seed=seed + number,
        )
        made.append(as_examples(samples, dtype))
    settings = set_settings(MAX_LENGTH, MAX_PREDICTIONS, seed)
    vocab_size = max(VOCAB_SIZES[dtype] for _, dtype in shards)
    return synthetic.write_set(set_dir, made, settings, vocab_size)


def assert_same_batch(batch: UnpaddedBatch, expected: UnpaddedBatch) -> None:
    """Equal dtypes, shapes and contents."""
    for field in fields(UnpaddedBatch):
        value, wanted = getattr(batch, field.name), getattr(expected, field.name)
        if not isinstance(wanted, torch.Tensor):
            assert value == wanted
        else:
            assert value.dtype == wanted.dtype and value.shape == wanted.shape
            assert torch.equal(value, wanted), field.name
