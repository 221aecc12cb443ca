"""The untimed init phase: synthetic steps, then all state restored bit for bit.

DDP runs its first step with one bucket and rebuilds its buckets afterwards; kernels, allocators and
communicators are set up at first use. A few steps on synthetic batches before the clock starts move
that out of the timed region without reading a sample, and make step 1 like every other step.
"""

import numpy as np
import torch
from torch import Tensor

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.batch import UnpaddedBatch, make_batch, pad
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.shards import Samples
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.step.captured import Step


def warm_up(
    config: RunConfig,
    step: Step,
    model: BertForPretraining,
    optimizer: FlatOptimizer,
    device: torch.device,
) -> None:
    """Run `run.warm_up_steps` steps and let `step` prepare itself, then restore all state.

    Weights, optimizer, FP8 scales and random streams are restored bit for bit. Raises ConfigError
    if an update does not fit into the GPU's memory.
    """
    # On the host: beside a batch as large as memory allows, a GPU has no room for copies.
    saved = {
        name: tensor.to("cpu", copy=True) for name, tensor in _live_state(model, optimizer).items()
    }
    streams = torch.get_rng_state()
    of_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    largest = step.shapes[-1] if step.shapes else None
    batch = synthetic_batch(config, largest).to(device)
    try:
        for number in range(1, config.run.warm_up_steps + 1):
            step(number, (batch,) * config.parallel.grad_accum_steps)
        step.prepare(lambda shape: pad(synthetic_batch(config, shape), shape))
    except torch.OutOfMemoryError as error:
        raise _too_large(config, batch, largest) from error
    optimizer.zero_grad()
    optimizer.settle()
    for name, tensor in _live_state(model, optimizer).items():
        tensor.copy_(saved[name])
    torch.set_rng_state(streams)
    if of_gpu is not None:
        torch.cuda.set_rng_state(of_gpu, device)


def _too_large(
    config: RunConfig, batch: UnpaddedBatch, captured: StaticShape | None
) -> ConfigError:
    """The error that forwards of `batch`, or of the largest `captured` shape, do not fit."""
    what, tokens, sequences = "a forward", len(batch.input_ids), len(batch.lengths)
    if captured is not None:
        what, tokens, sequences = "the captured capacity", captured.tokens, captured.sequences
    size = f"{what} of {tokens:,} tokens in {sequences:,} sequences"
    problem = f"{config.parallel.local_batch_size}: no memory left on the GPU for {size}"
    remedy = "lower it, and raise parallel.grad_accum_steps as much"
    return ConfigError("parallel.local_batch_size", problem, remedy)


def synthetic_batch(config: RunConfig, shape: StaticShape | None = None) -> UnpaddedBatch:
    """A micro-batch on the host of equal sequences that fill a shape as far as possible.

    Without a shape the sequences have full length, the most memory that a real batch can take.
    """
    count, length = config.parallel.local_batch_size, config.data.max_seq_length
    masked = config.data.max_predictions
    if shape is not None:
        count = shape.sequences
        length, masked = min(length, shape.tokens // count), shape.masked // count
    masked = max(1, min(masked, length - 1))
    token = np.arange(count * length, dtype=np.int64) % config.model.vocab_size
    samples = Samples(
        input_ids=token,
        lengths=np.full(count, length, dtype=np.int64),
        segment_b_start=np.full(count, length // 2, dtype=np.int64),
        masked_positions=np.tile(np.arange(1, masked + 1, dtype=np.int64), count),
        masked_ids=token[: count * masked].copy(),
        masked_counts=np.full(count, masked, dtype=np.int64),
        next_sentence_label=np.arange(count, dtype=np.int64) % 2,
    )
    return make_batch(
        samples, np.arange(count), mlm_denominator=count * masked, nsp_denominator=count
    )


def _live_state(model: BertForPretraining, optimizer: FlatOptimizer) -> dict[str, Tensor]:
    return {**model.state_dict(), **optimizer.changed_by_step(), **model.fp8_state()}
