"""The captured step: a whole update on static tensors, one graph for each capacity.

Forward, backward, all-reduce, clipping, schedule and update of every accumulation step are captured
in the untimed init phase. The batches of a step overwrite the static inputs, which the replay
reads. Without CUDA the same object runs the eager step over the same static inputs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Self

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.data.batch import UnpaddedBatch, blank
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.choices import AttentionChoice
from mlperf_bert.run.metrics import StepResult
from mlperf_bert.step.eager import EagerStep, MakeBatch
from mlperf_bert.step.replay import Replay

WARM_UP_CALLS = 3  # calls of an update before its capture
DDP_WARM_UP_CALLS = 11  # torch's notes on CUDA graphs require this with DistributedDataParallel
READ_LENGTHS_ON_THE_HOST = ("reference", "grouped")  # on CUDA


def check_capturable(attention: AttentionChoice, device: torch.device) -> None:
    """Raise ConfigError for attention, or a way to communicate, that a graph cannot hold."""
    if device.type != "cuda":
        return
    if attention.name in READ_LENGTHS_ON_THE_HOST:
        problem = (
            f"{attention.name!r} reads lengths on the host, which a captured step cannot do "
            f"[{attention.note}]"
        )
        remedy = "use 'triton' or 'flash' (bf16), or run.step_mode 'eager'"
        raise ConfigError("model.attention", problem, remedy)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        problem = "'captured' with ranks that share a GPU, and so talk over gloo"
        raise ConfigError("run.step_mode", problem, "use 'eager', or a rank for each GPU")


def use_capturable_stream(device: torch.device) -> None:
    """Switch this thread to a stream of its own, because the default one cannot be captured.

    Gradients are accumulated on the stream on which a parameter was first used, or on which
    DistributedDataParallel was built, so this must be called first.
    """
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class CapturedStep:
    """One update when called, like EagerStep; batches padded to one of `shapes` are replayed.

    Unpadded batches run eagerly. All ranks must replay the same steps. On CUDA, call
    `use_capturable_stream` before the model is built.

    Args:
        eager: the step to capture.
        shapes: shapes of the capacities, the smallest first.
        forwards: batches an update.
        device: of the model.
    """

    def __init__(
        self,
        eager: EagerStep,
        shapes: tuple[StaticShape, ...],
        *,
        forwards: int,
        device: torch.device,
    ) -> None:
        self._eager = eager
        self.shapes = shapes
        self._forwards = forwards
        self._device = device
        wrapped = isinstance(eager.model, DistributedDataParallel)
        self._warm_up_calls = DDP_WARM_UP_CALLS if wrapped else WARM_UP_CALLS
        self._captured: dict[StaticShape | None, tuple[StaticInputs, Replay[StepResult]]] = {}

    def prepare(self, make_batch: MakeBatch) -> None:
        """Capture an update of each shape on synthetic batches; weights and moments change."""
        is_cuda = self._device.type == "cuda"
        static = [StaticInputs(make_batch(s), self._forwards, self._device) for s in self.shapes]
        # All warm-ups first: they cannot use the memory that the first capture reserves. The
        # largest runs first, so that the others find memory.
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
            self._eager.optimizer.settle()  # gather the other ranks' weights inside the graph
            return result

        return update

    def __call__(self, step: int, micro_batches: tuple[UnpaddedBatch, ...]) -> StepResult:
        """Update once; the result is overwritten by the next call."""
        captured = self._captured.get(micro_batches[0].shape)
        if captured is None:
            return self._eager(step, micro_batches)
        inputs, replay = captured
        self._eager.optimizer.settle()  # an eager step's weights may still travel
        self._eager.number.fill_(step)
        inputs.overwrite(micro_batches)
        return replay()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Free the graphs before the process group of their collectives is destroyed.

        After an error they stay: the device may never finish them.
        """
        if kind is None:
            for _inputs, replay in self._captured.values():
                replay.close()
            self._captured.clear()


class StaticInputs:
    """One padded batch for each forward, in memory of its own that never moves."""

    def __init__(self, batch: UnpaddedBatch, forwards: int, device: torch.device) -> None:
        assert batch.shape is not None
        self.batches = tuple(blank(batch.shape, device) for _ in range(forwards))
        self.overwrite((batch,) * forwards)

    def overwrite(self, batches: tuple[UnpaddedBatch, ...]) -> None:
        """Copy in batches of this shape; on CUDA, on the current stream."""
        for static, batch in zip(self.batches, batches, strict=True):
            static.block.copy_(batch.block, non_blocking=True)
        # Host copies of lengths matter if the step is not captured.
        self.batches = tuple(
            replace(static, lengths=batch.lengths, masked_counts=batch.masked_counts)
            for static, batch in zip(self.batches, batches, strict=True)
        )


# The interface that the loop calls. Batches are padded to `shapes`, the smallest first.
Step = EagerStep | CapturedStep
