"""One optimizer update: forward and backward per micro-batch, clip, schedule, update. No host sync.

The learning rate, the loss scale, the count of updates and the decision to skip one live in tensors
on the device.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from mlperf_bert.config.sections import Precision
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.distributed.clipping import Clipping
from mlperf_bert.model.heads import LossSums, PretrainingLogits, pretraining_loss
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.optim.noise_meter import NoiseMeter, NoMeter
from mlperf_bert.run.metrics import StepResult

MakeBatch = Callable[[StaticShape], UnpaddedBatch]


class Step(Protocol):
    """What the loop calls: EagerStep, or CapturedStep (captured.py)."""

    @property
    def shapes(self) -> tuple[StaticShape, ...]:
        """What batches are padded to, the smallest first; none where they are not."""

    def prepare(self, make_batch: MakeBatch) -> None:
        """Get ready, on made-up batches of a shape, in the untimed init phase."""

    def __call__(self, step: int, micro_batches: tuple[UnpaddedBatch, ...]) -> StepResult:
        """Update once, as step number `step` counted from 1."""

    def __enter__(self) -> Self:
        """Begin a run of steps."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it, and let go of what is held on the device."""


class EagerStep:
    """Runs one update of `model` (bare, or wrapped in DistributedDataParallel) when called.

    `learning_rates` [steps + 1] float64, on the model's device: of each step from 1; element 0 is
    not used. `step` int64 [1] is the bare model's own number of the step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: FlatOptimizer,
        learning_rates: Tensor,
        clip: Clipping,
        step: Tensor,
        precision: Precision,
        noise: NoiseMeter | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._learning_rates = learning_rates
        self._step = step
        self._clip = clip
        self._precision: Precision = precision
        self._noise = noise or NoMeter()

    @property
    def shapes(self) -> tuple[StaticShape, ...]:
        """None: batches are not padded."""
        return ()

    @property
    def optimizer(self) -> FlatOptimizer:
        """What makes its updates."""
        return self._optimizer

    @property
    def number(self) -> Tensor:
        """Int64 [1]: the number of the step, which `update` reads on the device."""
        return self._step

    def __enter__(self) -> Self:
        """What was measured up to now was of synthetic steps."""
        self._noise.forget()
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def prepare(self, make_batch: MakeBatch) -> None:
        """Nothing to prepare."""

    def __call__(self, step: int, micro_batches: tuple[UnpaddedBatch, ...]) -> StepResult:
        """Update once, as step number `step` counted from 1.

        Where a gradient is not finite, no rank updates: weights, moments and the count behind their
        bias correction stay as they are. The schedule goes by the step's number, which advances.
        """
        self._step.fill_(step)
        self._noise.begin(step)
        return self.update(micro_batches)

    def update(self, micro_batches: tuple[UnpaddedBatch, ...]) -> StepResult:
        """The update of the step whose number was set: operations on the device alone."""
        self._optimizer.zero_grad()
        losses = [
            self._backward(batch, is_last=index == len(micro_batches) - 1)
            for index, batch in enumerate(micro_batches)
        ]
        outcome = self._clip.finish()
        noise = self._noise.end(outcome)
        learning_rate = self._learning_rates.index_select(0, self._step).squeeze()
        self._optimizer.step(learning_rate, outcome.gradient_factor, outcome.skip)
        return StepResult(torch.stack(losses).sum(), outcome, learning_rate, noise)

    def _backward(self, batch: UnpaddedBatch, *, is_last: bool) -> Tensor:
        """Add one micro-batch's gradients; the last one averages them over the ranks."""
        with self._clip.forward(is_last=is_last):
            sums = training_loss_sums(self._model, batch, self._precision)
            loss = pretraining_loss(sums, batch)
            self._optimizer.loss_scale.of(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def weights_dtype(precision: Precision, otherwise: torch.dtype = torch.float32) -> torch.dtype:
    """What the model's weights and gradients are in: `otherwise` where a precision rounds none."""
    rounded = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
    return rounded.get(precision, otherwise)


def forward(model: nn.Module, batch: UnpaddedBatch, precision: Precision) -> PretrainingLogits:
    """The model's logits: in the dtype of its weights, or under autocast where `precision` is."""
    device = batch.input_ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16_autocast"):
        logits: PretrainingLogits = model(batch)
    return logits


def training_loss_sums(model: nn.Module, batch: UnpaddedBatch, precision: Precision) -> LossSums:
    """The model's summed losses, as `forward`; logits need not be there all at once."""
    device = batch.input_ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16_autocast"):
        sums: LossSums = model(batch, "loss_sums")
    return sums
