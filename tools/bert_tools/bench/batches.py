"""Batches of made-up words with real lengths, padded as a run would."""

import numpy as np
import torch

from bert_tools.bench.synthetic import synthetic_samples
from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.batch import UnpaddedBatch, make_batch, pad
from mlperf_bert.data.capacity import CapacityPlan, StaticShape
from mlperf_bert.data.length_histogram import SHORTEST, real_lengths
from mlperf_bert.data.shards import IntArray

Update = tuple[UnpaddedBatch, ...]
"""The micro-batches of one step."""


def make_updates(
    lengths: IntArray,
    num_updates: int,
    *,
    forwards: int,
    vocab_size: int,
    max_predictions: int,
    seed: int,
) -> list[Update]:
    """Distinct updates on the host: `lengths` cut into equal forwards, `forwards` an update."""
    updates = []
    for number, of_update in enumerate(np.split(np.arange(len(lengths)), num_updates)):
        forwards_ids = np.split(of_update, forwards)
        drawn = [
            synthetic_samples(
                lengths[ids],
                vocab_size=vocab_size,
                max_predictions=max_predictions,
                seed=derive_seed(seed, "samples", number * forwards + forward),
            )
            for forward, ids in enumerate(forwards_ids)
        ]
        num_masked = float(sum(samples.masked_counts.sum() for samples in drawn))
        updates.append(
            tuple(
                make_batch(
                    samples,
                    ids,
                    mlm_denominator=num_masked,
                    nsp_denominator=float(len(of_update)),
                )
                for samples, ids in zip(drawn, forwards_ids, strict=True)
            )
        )
    return updates


def run_updates(config: RunConfig, num_updates: int, tokens: int | None = None) -> list[Update]:
    """Updates as one rank of `config` gets them, on the host, not padded.

    `tokens`: of every forward; without it, as many as its sequences happen to have.
    """
    seed, parallel = int(config.run.seed), config.parallel
    count = num_updates * parallel.grad_accum_steps * parallel.local_batch_size
    longest = config.data.max_seq_length
    lengths = real_lengths(count, longest, derive_seed(seed, "lengths"))
    if tokens is not None:
        forwards = np.split(lengths, count // parallel.local_batch_size)
        lengths = np.concatenate([with_total(each, tokens, longest) for each in forwards])
    return make_updates(
        lengths,
        num_updates,
        forwards=parallel.grad_accum_steps,
        vocab_size=config.model.vocab_size,
        max_predictions=config.data.max_predictions,
        seed=seed,
    )


def with_total(lengths: IntArray, total: int, longest: int) -> IntArray:
    """Lengths, each within SHORTEST .. `longest`, that sum to `total`: the first ones changed."""
    missing = total - int(lengths.sum())
    room = longest - lengths if missing > 0 else lengths - SHORTEST
    before = np.cumsum(room) - room
    changed: IntArray = lengths + np.sign(missing) * np.clip(abs(missing) - before, 0, room)
    return changed


def shape_of(config: RunConfig, updates: list[Update]) -> StaticShape:
    """The smallest shape that holds every forward of these updates."""
    forwards = [batch for update in updates for batch in update]
    capacity = CapacityPlan(
        tokens=max(batch.input_ids.shape[0] for batch in forwards),
        sequences=config.parallel.local_batch_size,
        masked=max(batch.labels.shape[0] for batch in forwards),
        basis="exact",
    )
    data = config.data
    return StaticShape.of(capacity, max_seqlen=data.max_seq_length, max_masked=data.max_predictions)


def padded(update: Update, shapes: tuple[StaticShape, ...]) -> Update:
    """The update padded to the smallest shape that holds it; as it is where none does."""
    sizes = {
        "tokens": np.array([batch.input_ids.shape[0] for batch in update]),
        "sequences": np.array([len(batch.lengths) for batch in update]),
        "masked": np.array([batch.labels.shape[0] for batch in update]),
    }
    shape = next((shape for shape in shapes if shape.holds(**sizes)), None)
    return update if shape is None else tuple(pad(batch, shape) for batch in update)


def on_device(updates: list[Update], device: torch.device) -> list[Update]:
    """The same updates there."""
    return [tuple(batch.to(device) for batch in update) for update in updates]
