"""The training step that `bench` measures.

This step is that of a real run, with all batches already on the device. The batches contain random
words, have published sequence lengths, and are padded as in a real run.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bert_tools.common.length_histogram import planner_of_run, run_shapes
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import STORED_MASKING_RATE
from mlperf_bert.data.batch import UnpaddedBatch, make_batch, pad
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.index import masked_count_table
from mlperf_bert.data.shards import IntArray, Samples
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.errors import ConfigError
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
    """A training run on one rank. Calling it with the number of a step runs this step.

    The steps cycle through `updates`. After the config's last step, the learning rates start again
    from the first step.
    """

    config: RunConfig
    device: torch.device
    model: BertForPretraining
    optimizer: FlatOptimizer
    step: Step
    host_updates: list[Update]  # without padding
    updates: list[Update]  # on the device, and padded if the step is captured

    def __call__(self, number: int) -> Tensor:
        """Run update `number`, counted from 0, and return the loss before it as a 0-d tensor."""
        update = self.updates[number % len(self.updates)]
        return self.step(1 + number % self.config.max_steps, update).loss

    @property
    def padding_share(self) -> float:
        """Fraction of the computed tokens that are padding, 0 .. 1."""
        real, computed = (
            sum(len(batch.input_ids) for update in updates for batch in update)
            for updates in (self.host_updates, self.updates)
        )
        return 1 - real / computed


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that runs CUDA work on a new stream.

    A step can be captured only on such a stream, because CUDA cannot capture the default stream. On
    other devices, the context manager has no effect.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@contextmanager
def training_run(
    config: RunConfig, device: torch.device, *, num_updates: int
) -> Iterator[TrainingRun]:
    """Return a context manager that builds a run on one rank, and frees it at the end.

    The run is built as `train` builds it, with `num_updates` different updates. Raises ConfigError
    if the config cannot run on this machine.
    """
    seed = int(config.run.seed)
    # The memory peak is reset before the capture, because a replay allocates nothing. There are no
    # statistics to reset before CUDA is initialized.
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
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
    """Return a context manager that prepares the training step of a given model, and frees it.

    Unlike a real run, it does not warm up on full-length batches, because these need twice the
    memory of real batches.

    Args:
        model: the model with its initial weights, on its device.
        config: the config of the run.
        updates: the updates, on the host, without padding.
        shapes: the shapes of a captured step, or an empty tuple for an eager step.
    """
    device = model.step.device
    padded_updates = [padded(update, shapes) for update in updates]
    needed = {batch.shape for update in padded_updates for batch in update}
    if shapes and None in needed:
        problem = "is 'captured', but a batch fits none of the shapes that a run captures"
        raise ConfigError("run.step_mode", problem, "measure with --set run.step_mode=eager")
    # Only the shapes that are needed are captured, because each capture takes seconds.
    shapes = tuple(shape for shape in shapes if shape in needed)
    if shapes:
        check_capturable(model.attention, device)
    averaged, initial = make_data_parallel(model, config, ALONE, device)
    optimizer = make_optimizer(
        config.optim, averaged.buffers, initial, averaged.gradients, averaged.shards
    )
    del initial  # a sharded optimizer keeps its own copy of its share
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
    """Return the batches of `num_updates` updates of one rank, on the host and without padding.

    They are rank 0's in the first steps of a run, whose sampler and balance get samples with
    published lengths, scaled to the config's maximum.
    """
    planner, lengths = planner_of_run(config), []
    for step in range(1, num_updates + 1):
        plan = planner.plan(step)
        micro_batches = range(config.parallel.grad_accum_steps)
        lengths.append([np.array(plan.sizes_of(0, each)[0]) for each in micro_batches])
    return updates_of_lengths(config, lengths)


def updates_of_lengths(config: RunConfig, lengths: Iterable[Sequence[IntArray]]) -> list[Update]:
    """Generate updates of random samples with given lengths, on the host and without padding.

    `lengths` has an int64 array [sequences] for each micro-batch of each update.
    """
    data, updates, num_samples = config.data, [], 0
    for row, update_lengths in enumerate(lengths):
        first_batch = row * len(update_lengths)
        samples = [
            synthetic_samples(
                batch_lengths,
                vocab_size=config.model.vocab_size,
                max_predictions=data.max_predictions,
                seed=derive_seed(int(config.run.seed), "samples", first_batch + number),
                masking_rate=data.masking_rate,
            )
            for number, batch_lengths in enumerate(update_lengths)
        ]
        denominators = {
            "mlm_denominator": float(sum(each.masked_counts.sum() for each in samples)),
            "nsp_denominator": float(sum(len(each.lengths) for each in samples)),
        }
        batches = []
        for each in samples:
            ids = np.arange(num_samples, num_samples + len(each.lengths))
            num_samples += len(ids)
            batches.append(make_batch(each, ids, **denominators))
        updates.append(tuple(batches))
    return updates


def padded(update: Update, shapes: tuple[StaticShape, ...]) -> Update:
    """Pad an update to the first of `shapes` into which it fits.

    If the update fits into none of the shapes, it is returned unchanged.
    """
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
    """Generate random samples of the given lengths.

    Words are drawn uniformly from 1 .. vocab_size - 1. The id 0 is excluded, because it is the
    padding token, which some models treat specially. Segments and masked positions are chosen as in
    `prepare`.

    Args:
        lengths: int64 [n], each at least SHORTEST.
        vocab_size: size of the vocabulary, at least 2.
        max_predictions: largest number of masked positions in a sample.
        seed: seed of all random numbers.
        masking_rate: fraction of a sample's tokens to mask.
    """
    generator = np.random.default_rng(seed)
    segment_b_start = generator.integers(3, lengths - 1)
    table = masked_count_table(int(lengths.max()), max_predictions, masking_rate)
    masked_counts = table[lengths].astype(np.int64)
    masked_positions = []
    for length, start, count in zip(lengths, segment_b_start, masked_counts, strict=True):
        # Positions of words: all except that of [CLS] and those of the two [SEP].
        words = np.delete(np.arange(1, length - 1), start - 2)
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
