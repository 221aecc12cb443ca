"""A step of ours as a run would do it, with batches for it on the device: what `bench` measures."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bert_tools.bench.batches import Update, on_device, padded, run_updates, shape_of
from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.batch import UnpaddedBatch, pad
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.length_histogram import run_shapes
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.saved_bytes import Forward
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.parts.build import build_step, check_memory, make_model
from mlperf_bert.parts.memory_plan import forward_of_lengths, forward_of_shape
from mlperf_bert.step.captured import Step
from mlperf_bert.step.warm_up import synthetic_batch

ALONE = RankInfo(
    rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, launcher="single"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """Calling it does one update, as the step of that number, on the updates in turn."""

    config: RunConfig
    device: torch.device
    model: BertForPretraining
    optimizer: FlatOptimizer
    step: Step
    host_updates: list[Update]  # without padding
    updates: list[Update]  # on the device; padded where the step is captured

    def __call__(self, number: int) -> Tensor:
        """Update for the `number`-th time, counted from 0; the loss before it, 0-d."""
        update = self.updates[number % len(self.updates)]
        return self.step(1 + number % self.config.max_steps, update).loss

    @property
    def padding_share(self) -> float:
        """Of the tokens that are computed, how many are padding."""
        real, computed = (
            sum(batch.input_ids.shape[0] for update in updates for batch in update)
            for updates in (self.host_updates, self.updates)
        )
        return 1 - real / computed


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """On CUDA a stream that is not the default one, which cannot be captured."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@contextmanager
def training_run(
    config: RunConfig, device: torch.device, *, num_updates: int, tokens: int | None = None
) -> Iterator[TrainingRun]:
    """Build it on one rank, as training does, and free it. Raises ConfigError for what cannot run.

    `tokens`: of every forward, with a capacity to match; else real ones, and a run's capacities.
    """
    seed = int(config.run.seed)
    if device.type == "cuda":  # before the capture: a replay takes no memory of its own
        torch.cuda.reset_peak_memory_stats(device)
    updates = run_updates(config, num_updates, tokens)
    shapes: tuple[StaticShape, ...] = ()
    if config.run.step_mode == "captured":
        shapes = run_shapes(config) if tokens is None else (shape_of(config, updates),)
    check_memory(config, device, lambda: _largest_forward(config, updates, shapes), evaluates=False)
    with own_stream(device):
        model = make_model(config, seed, device)
        torch.manual_seed(derive_seed(seed, "dropout of others' kernels"))
        with run_of_model(model, config, updates, shapes) as run:
            yield run


def _largest_forward(
    config: RunConfig, updates: list[Update], shapes: tuple[StaticShape, ...]
) -> Forward:
    """Of these updates, padded to the smallest of `shapes` that has the room."""
    largest = max((batch for update in updates for batch in update), key=_num_tokens)
    tokens, masked = _num_tokens(largest), len(largest.labels)
    fitting = (each for each in shapes if each.tokens >= tokens and each.masked >= masked)
    shape = next(fitting, None)
    if shape is not None:
        return forward_of_shape(shape)
    return forward_of_lengths(config, np.array(largest.lengths), np.array(largest.masked_counts))


def _num_tokens(batch: UnpaddedBatch) -> int:
    return len(batch.input_ids)


@contextmanager
def run_of_model(
    model: BertForPretraining,
    config: RunConfig,
    updates: list[Update],
    shapes: tuple[StaticShape, ...],
) -> Iterator[TrainingRun]:
    """The step that a run of `config` gets on this one rank, ready; and free it.

    A run's full-length warm-up is left out: it needs twice the memory of real lengths.

    Args:
        model: with its initial weights, on its device.
        updates: on the host, without padding.
        shapes: of a captured step; none for an eager one.
    """
    device = model.step.device
    padded_updates = [padded(update, shapes) for update in updates]
    needed = {batch.shape for update in padded_updates for batch in update}
    shapes = tuple(shape for shape in shapes if shape in needed)  # a capture takes seconds
    optimizer, step = build_step(model, config, ALONE, device, shapes)
    step.prepare(lambda shape: pad(synthetic_batch(config, shape), shape))
    with step:
        yield TrainingRun(
            config=config,
            device=device,
            model=model,
            optimizer=optimizer,
            step=step,
            host_updates=updates,
            updates=on_device(padded_updates, device),
        )
