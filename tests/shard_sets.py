"""Small prepared sets of made-up samples, any number of shards, written without text."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from bert_tools.bench import synthetic
from bert_tools.bench.synthetic import as_examples, set_settings, synthetic_samples
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.index import Manifest
from mlperf_bert.data.length_histogram import SHORTEST

MAX_LENGTH = 40
MAX_PREDICTIONS = 6
VOCAB_SIZES = {"<u2": 1000, "<u4": 100_000}  # by the dtype of the tokens


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
