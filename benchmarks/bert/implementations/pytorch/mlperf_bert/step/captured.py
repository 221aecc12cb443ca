"""Capture a whole update in one CUDA graph per capacity, and warm it up before training.

The untimed init phase captures the forward and backward passes of all micro-batches, the
all-reduce, clipping, the learning-rate schedule and the weight update. In each step, the new
batches overwrite the graph's static inputs before the graph is replayed. Without CUDA, the same
object runs the eager step on these static inputs.

DistributedDataParallel (DDP) runs its first step with one bucket and rebuilds its buckets
afterwards. Kernels, allocators and communicators are also set up at first use. The warm-up
therefore runs a few steps on synthetic batches before MLPerf's clock starts. The warm-up reads no
samples. After it, step 1 takes as long as every other step. After the warm-up, all state is
restored bit-for-bit.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.batch import UnpaddedBatch, blank, make_batch, pad
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.shards import Samples
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.choices import AttentionChoice
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.run.metrics import StepResult
from mlperf_bert.step.eager import EagerStep, MakeBatch
from mlperf_bert.step.replay import Replay

WARM_UP_CALLS = 3  # calls of an update before its capture
DDP_WARM_UP_CALLS = 11  # the same with DDP, as required by torch's notes on CUDA graphs
READ_LENGTHS_ON_THE_HOST = ("reference", "grouped")  # policies that do so on CUDA


def check_capturable(attention: AttentionChoice, device: torch.device) -> None:
    """Raise ConfigError if a graph cannot capture this attention or the process group's backend."""
    if device.type != "cuda":
        return
    if attention.name in READ_LENGTHS_ON_THE_HOST:
        problem = (
            f"{attention.name!r} reads lengths on the host, which a captured step cannot do "
            f"[{attention.note}]"
        )
        remedy = "set model.attention to 'triton' or 'flash' (bf16), or run.step_mode to 'eager'"
        raise ConfigError("model.attention", problem, remedy)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        problem = "'captured' does not support ranks that share a GPU and therefore use gloo"
        raise ConfigError("run.step_mode", problem, "set 'eager', or start one rank per GPU")


def use_capturable_stream(device: torch.device) -> None:
    """Switch this thread to a new CUDA stream, because the default stream cannot be captured.

    Call this before anything else. Gradients are accumulated on the stream that was current when a
    parameter was first used or DistributedDataParallel was built.
    """
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class CapturedStep:
    """A step that is called like `EagerStep`, but replays a CUDA graph for padded batches.

    If the batches are not padded to one of `shapes`, the call runs eagerly. All ranks must replay
    graphs in the same steps. On CUDA, call `use_capturable_stream` before building the model.

    Args:
        eager: the step to capture.
        shapes: shapes of the capacities, smallest first.
        micro_batches: number of micro-batches per update.
        device: device of the model.
    """

    def __init__(
        self,
        eager: EagerStep,
        shapes: tuple[StaticShape, ...],
        *,
        micro_batches: int,
        device: torch.device,
    ) -> None:
        self._eager = eager
        self.shapes = shapes
        self._micro_batches = micro_batches
        self._device = device
        wrapped = isinstance(eager.model, DistributedDataParallel)
        self._warm_up_calls = DDP_WARM_UP_CALLS if wrapped else WARM_UP_CALLS
        self._captured: dict[StaticShape | None, tuple[StaticInputs, Replay[StepResult]]] = {}

    def prepare(self, batch_of: MakeBatch) -> None:
        """Capture one update for each shape on synthetic batches.

        The warm-up calls before the captures change weights and moments.
        """
        is_cuda = self._device.type == "cuda"
        static = [StaticInputs(batch_of(s), self._micro_batches, self._device) for s in self.shapes]
        # All warm-ups run before the first capture, because they cannot use the memory that it
        # reserves. The largest runs first, so that the others can reuse its memory.
        for inputs in reversed(static):
            for _ in range(self._warm_up_calls if is_cuda else 0):
                self._update_of(inputs)()
        pool = torch.cuda.graph_pool_handle() if is_cuda else None
        stream = torch.cuda.current_stream(self._device) if is_cuda else None
        for inputs in reversed(static):
            update = self._update_of(inputs)
            replay = Replay(update, self._device, warm_up_calls=0, stream=stream, pool=pool)
            self._captured[inputs.batches[0].shape] = inputs, replay

    def _update_of(self, inputs: "StaticInputs") -> Callable[[], StepResult]:
        def update() -> StepResult:
            result = self._eager.update(inputs.batches)
            self._eager.optimizer.wait_for_weights()  # so that the graph contains the gathers
            return result

        return update

    def __call__(self, step: int, micro_batches: tuple[UnpaddedBatch, ...]) -> StepResult:
        """Run one update, and return its result. The next call overwrites this result."""
        captured = self._captured.get(micro_batches[0].shape)
        if captured is None:
            return self._eager(step, micro_batches)
        inputs, replay = captured
        self._eager.optimizer.wait_for_weights()  # gathers of an eager step may be unfinished
        self._eager.number.fill_(step)
        inputs.overwrite(micro_batches)
        return replay()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Free the graphs, because their process group will be destroyed after this call.

        After an error the graphs are kept, because the device may never finish their work.
        """
        if kind is None:
            for _inputs, replay in self._captured.values():
                replay.close()
            self._captured.clear()


class StaticInputs:
    """Padded batches, one per micro-batch, in memory whose address never changes."""

    def __init__(self, batch: UnpaddedBatch, micro_batches: int, device: torch.device) -> None:
        assert batch.shape is not None
        self.batches = tuple(blank(batch.shape, device) for _ in range(micro_batches))
        self.overwrite((batch,) * micro_batches)

    def overwrite(self, batches: tuple[UnpaddedBatch, ...]) -> None:
        """Copy batches of the same shape into the inputs. On CUDA this uses the current stream."""
        for static, batch in zip(self.batches, batches, strict=True):
            static.block.copy_(batch.block, non_blocking=True)
        # Layers read the host copies of lengths if the step is not captured.
        self.batches = tuple(
            replace(static, lengths=batch.lengths, masked_counts=batch.masked_counts)
            for static, batch in zip(self.batches, batches, strict=True)
        )


# The interface that the training loop calls. Batches are padded to its `shapes`, smallest first.
Step = EagerStep | CapturedStep


def warm_up(
    config: RunConfig,
    step: Step,
    model: BertForPretraining,
    optimizer: FlatOptimizer,
    device: torch.device,
) -> None:
    """Run `run.warm_up_steps` steps on synthetic batches, prepare `step`, and restore all state.

    Weights, optimizer state, FP8 scales and random-number generators are restored bit-for-bit.
    Raises ConfigError if an update does not fit into the GPU's memory.
    """
    # The copies are on the host, because the batch may leave no free memory on the GPU.
    saved = {
        name: tensor.to("cpu", copy=True) for name, tensor in _live_state(model, optimizer).items()
    }
    rng_state = torch.get_rng_state()
    cuda_rng_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    largest = step.shapes[-1] if step.shapes else None
    batch = synthetic_batch(config, largest).to(device)
    try:
        for number in range(1, config.run.warm_up_steps + 1):
            step(number, (batch,) * config.parallel.grad_accum_steps)
        step.prepare(lambda shape: pad(synthetic_batch(config, shape), shape))
    except torch.OutOfMemoryError as error:
        raise _too_large(config, batch, largest) from error
    optimizer.zero_grad()
    optimizer.wait_for_weights()
    for name, tensor in _live_state(model, optimizer).items():
        tensor.copy_(saved[name])
    torch.set_rng_state(rng_state)
    if cuda_rng_state is not None:
        torch.cuda.set_rng_state(cuda_rng_state, device)


def _too_large(
    config: RunConfig, batch: UnpaddedBatch, captured: StaticShape | None
) -> ConfigError:
    """Return the error for an update that does not fit into the GPU's memory.

    If steps are captured, the error contains the largest captured shape, and otherwise the batch.
    """
    what, tokens, sequences = "a micro-batch", len(batch.input_ids), len(batch.lengths)
    if captured is not None:
        what, tokens, sequences = "the captured capacity", captured.tokens, captured.sequences
    size = f"{what} of {tokens:,} tokens in {sequences:,} sequences"
    problem = f"{config.parallel.local_batch_size} needs {size}, which exceeds the GPU's memory"
    remedy = "lower this setting, and raise parallel.grad_accum_steps by the same factor"
    return ConfigError("parallel.local_batch_size", problem, remedy)


def synthetic_batch(config: RunConfig, shape: StaticShape | None = None) -> UnpaddedBatch:
    """Create a micro-batch in host memory that consists of sequences of equal length.

    The sequences fill `shape` as far as possible. If `shape` is None, they have the maximum length,
    so that no real batch needs more memory.
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
