"""What a guess without context reaches on a set: the floor that a trained model must beat.

Two guesses over all masked positions of the set. Where the input still shows a token (kept or
replaced by a random one), the context-free guess is that token; where it is [MASK], it is the most
frequent label among the set's [MASK] inputs.
"""

import numpy as np

from mlperf_bert.data.index import Baseline, Manifest
from mlperf_bert.data.shards import SampleReader

SAMPLES_AT_A_TIME = 1024


def measure_baseline(reader: SampleReader, manifest: Manifest) -> Baseline:
    """Both accuracies over the whole set; `mask_only_accuracy` is over the [MASK] inputs alone."""
    label_counts = np.zeros(manifest.vocab_size, dtype=np.int64)
    masked_tokens = 0
    visible_right = 0
    for first in range(0, manifest.num_samples, SAMPLES_AT_A_TIME):
        last = min(first + SAMPLES_AT_A_TIME, manifest.num_samples)
        samples = reader.read(np.arange(first, last, dtype=np.int64))
        starts = np.cumsum(samples.lengths) - samples.lengths
        rows = np.repeat(starts, samples.masked_counts) + samples.masked_positions
        inputs = samples.input_ids[rows]
        is_mask = inputs == manifest.mask_id
        labels_at_mask = samples.masked_ids[is_mask]
        label_counts += np.bincount(labels_at_mask, minlength=manifest.vocab_size)
        visible_right += int((~is_mask & (inputs == samples.masked_ids)).sum())
        masked_tokens += len(inputs)
    mask_inputs = int(label_counts.sum())
    most_frequent = int(label_counts.max())
    return Baseline(
        context_free_accuracy=(visible_right + most_frequent) / masked_tokens,
        mask_only_accuracy=most_frequent / max(1, mask_inputs),
        masked_tokens=masked_tokens,
        mask_inputs=mask_inputs,
    )
