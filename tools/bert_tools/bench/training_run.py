"""The training step that `bench` measures, as in a run, with its batches on the device.

The batches have random words in published lengths, padded as in a run.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bert_tools.common.length_histogram import masked_counts_of, real_lengths, run_shapes
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import STORED_MASKING_RATE
from mlperf_bert.data.batch import UnpaddedBatch, make_batch, pad
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.shards import IntArray, Samples
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.model.bert import BertForPretraining, check_memory, make_model
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.optim.optimizers import make_optimizer
from mlperf_bert.optim.schedule import rates_of_run
from mlperf_bert.seeds import derive_seed
from mlperf_bert.step.captured import CapturedStep, Step, check_capturable, synthetic_batch
from mlperf_bert.step.data_parallel import make_data_parallel
from mlperf_bert.step.eager import EagerStep

ALONE = RankInfo(
    rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, launcher="single"
)
Update = tuple[UnpaddedBatch, ...]
"""The micro-batches of one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """A call makes one update, as the step of that number, on the updates in turn."""

    config: RunConfig
    device: torch.device
    model: BertForPretraining
    optimizer: FlatOptimizer
    step: Step
    host_updates: list[Update]  # without padding
    updates: list[Update]  # on the device; padded where the step is captured

    def __call__(self, number: int) -> Tensor:
        """Make update `number`, counted from 0; returns the loss before it, 0-d."""
        update = self.updates[number % len(self.updates)]
        return self.step(1 + number % self.config.max_steps, update).loss

    @property
    def padding_share(self) -> float:
        """Share of padding among the computed tokens."""
        real, computed = (
            sum(len(batch.input_ids) for update in updates for batch in update)
            for updates in (self.host_updates, self.updates)
        )
        return 1 - real / computed


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Use a stream of its own on CUDA, as the default one cannot be captured."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@contextmanager
def training_run(
    config: RunConfig, device: torch.device, *, num_updates: int
) -> Iterator[TrainingRun]:
    """Build a run on one rank, as training does, and free it.

    Raises ConfigError if it cannot run.
    """
    seed = int(config.run.seed)
    if device.type == "cuda":  # before the capture, as a replay allocates nothing
        torch.cuda.init()  # type: ignore[no-untyped-call]  # else there are no statistics to reset
        torch.cuda.reset_peak_memory_stats(device)
    updates = run_updates(config, num_updates)
    shapes = run_shapes(config) if config.run.step_mode == "captured" else ()
    check_memory(config, device)
    with own_stream(device):
        model = make_model(config, seed, device)
        torch.manual_seed(derive_seed(seed, "dropout of others' kernels"))
        with run_of_model(model, config, updates, shapes) as run:
            yield run


@contextmanager
def run_of_model(
    model: BertForPretraining,
    config: RunConfig,
    updates: list[Update],
    shapes: tuple[StaticShape, ...],
) -> Iterator[TrainingRun]:
    """The step of a run of `config` on this one rank, ready to call; freed at the end.

    It skips a run's full-length warm-up, which needs twice the memory of real lengths.

    Args:
        model: with its initial weights, on its device.
        updates: on the host, without padding.
        shapes: shapes of a captured step; none for an eager one.
    """
    device = model.step.device
    padded_updates = [padded(update, shapes) for update in updates]
    needed = {batch.shape for update in padded_updates for batch in update}
    shapes = tuple(shape for shape in shapes if shape in needed)  # a capture takes seconds
    if shapes:
        check_capturable(model.attention, device)
    averaged, initial = make_data_parallel(model, config, ALONE, device)
    optimizer = make_optimizer(
        config.optim, averaged.buffers, initial, averaged.gradients, averaged.shards
    )
    del initial  # a sharded optimizer keeps a part of its own
    rates, precision = rates_of_run(config, device), config.model.precision
    eager = EagerStep(averaged.model, optimizer, rates, averaged.clipping, model.step, precision)
    step: Step = eager
    if shapes:
        micro_batches = config.parallel.grad_accum_steps
        step = CapturedStep(eager, shapes, micro_batches=micro_batches, device=device)
    step.prepare(lambda shape: pad(synthetic_batch(config, shape), shape))
    with step:
        yield TrainingRun(
            config=config,
            device=device,
            model=model,
            optimizer=optimizer,
            step=step,
            host_updates=updates,
            updates=[tuple(batch.to(device) for batch in update) for update in padded_updates],
        )


def run_updates(config: RunConfig, num_updates: int) -> list[Update]:
    """Distinct updates as one rank of `config` gets them, on the host, unpadded."""
    shape = (num_updates, config.parallel.grad_accum_steps, config.parallel.local_batch_size)
    seed = derive_seed(int(config.run.seed), "lengths")
    lengths = real_lengths(math.prod(shape), config.data.max_seq_length, seed)
    return updates_of_lengths(config, lengths.reshape(shape))


def updates_of_lengths(config: RunConfig, lengths: IntArray) -> list[Update]:
    """An update of made-up samples for each row of `lengths`, on the host, unpadded.

    `lengths` is int64 [updates, micro-batches, sequences].
    """
    data, updates = config.data, []
    ids = np.arange(lengths.size).reshape(lengths.shape)
    for row, of_update in enumerate(lengths):
        samples = [
            synthetic_samples(
                of_micro_batch,
                vocab_size=config.model.vocab_size,
                max_predictions=data.max_predictions,
                seed=derive_seed(int(config.run.seed), "samples", row * len(of_update) + number),
                masking_rate=data.masking_rate,
            )
            for number, of_micro_batch in enumerate(of_update)
        ]
        num_masked = float(sum(each.masked_counts.sum() for each in samples))
        num_sequences = float(of_update.size)
        updates.append(
            tuple(
                make_batch(each, of, mlm_denominator=num_masked, nsp_denominator=num_sequences)
                for each, of in zip(samples, ids[row], strict=True)
            )
        )
    return updates


def padded(update: Update, shapes: tuple[StaticShape, ...]) -> Update:
    """The update padded to the smallest shape that holds it; unchanged if none does."""
    sizes = {
        "tokens": np.array([len(batch.input_ids) for batch in update]),
        "sequences": np.array([len(batch.lengths) for batch in update]),
        "masked": np.array([len(batch.labels) for batch in update]),
    }
    shape = next((shape for shape in shapes if shape.holds(**sizes)), None)
    return update if shape is None else tuple(pad(batch, shape) for batch in update)


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
