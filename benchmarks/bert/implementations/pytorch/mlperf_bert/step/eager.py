"""Run one optimizer update without synchronizing the host with the device.

An update consists of a forward and a backward pass per micro-batch, gradient clipping, the
learning-rate schedule and the weight update. The learning rate, the number of updates and the
decision whether to skip an update are tensors on the device.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from mlperf_bert.config.sections import Precision
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.distributed.clipping import Clipping
from mlperf_bert.model.layers import LossSums, PretrainingLogits, pretraining_loss
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.run.metrics import StepResult

MakeBatch = Callable[[StaticShape], UnpaddedBatch]


class EagerStep:
    """An eager step, which runs one update of `model` when called.

    `model` may be wrapped in DistributedDataParallel. `learning_rates`, float64 [steps + 1] on the
    model's device, contains the learning rate of each step. Steps count from 1, so element 0 is not
    used. `step`, int64 [1], is the model's step number.
    """

    shapes: tuple[StaticShape, ...] = ()  # batches stay unpadded

    def __init__(
        self,
        model: nn.Module,
        optimizer: FlatOptimizer,
        learning_rates: Tensor,
        clip: Clipping,
        step: Tensor,
        precision: Precision,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._learning_rates = learning_rates
        self.number = step
        self._clip = clip
        self._precision: Precision = precision

    def __enter__(self) -> Self:
        """Do nothing at the start of the run phase, because an eager step needs no preparation."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing, because an eager step has no resources to free."""

    def prepare(self, batch_of: MakeBatch) -> None:
        """Do nothing, because an eager step needs no capture."""

    def __call__(self, step: int, micro_batches: tuple[UnpaddedBatch, ...]) -> StepResult:
        """Run the update of step number `step`. Steps count from 1.

        If a gradient is not finite, all ranks skip the update. Weights, moments and the update
        count of the bias correction then stay the same. The learning-rate schedule still advances
        with the step number.
        """
        self.number.fill_(step)
        return self.update(micro_batches)

    def update(self, micro_batches: tuple[UnpaddedBatch, ...]) -> StepResult:
        """Run the update for the step number in `number`, using only operations on the device."""
        self.optimizer.zero_grad()
        losses = [
            self._backward(batch, is_last=index == len(micro_batches) - 1)
            for index, batch in enumerate(micro_batches)
        ]
        outcome = self._clip.finish()
        learning_rate = self._learning_rates.index_select(0, self.number).squeeze()
        self.optimizer.step(learning_rate, outcome.gradient_factor, outcome.skip)
        return StepResult(torch.stack(losses).sum(), outcome, learning_rate)

    def _backward(self, batch: UnpaddedBatch, *, is_last: bool) -> Tensor:
        """Add the gradients of one micro-batch to those of the earlier ones, and return its loss.

        If it is the last micro-batch of the update, average the gradients over the ranks.
        """
        with self._clip.forward(is_last=is_last):
            sums = training_loss_sums(self.model, batch, self._precision)
            loss = pretraining_loss(sums, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def weights_dtype(precision: Precision, otherwise: torch.dtype = torch.float32) -> torch.dtype:
    """Return the dtype that weights and gradients have in a precision.

    Returns bfloat16 if the precision rounds weights to 16 bits, and `otherwise` if not.
    """
    return torch.bfloat16 if precision in ("bf16", "fp8") else otherwise


def forward(model: nn.Module, batch: UnpaddedBatch, precision: Precision) -> PretrainingLogits:
    """Compute the model's logits, under autocast if `precision` requires it."""
    with _autocast(batch, precision):
        logits: PretrainingLogits = model(batch)
    return logits


def training_loss_sums(model: nn.Module, batch: UnpaddedBatch, precision: Precision) -> LossSums:
    """Compute the summed losses of the model without storing the logits of all tokens at once.

    The forward pass runs under autocast if `precision` requires it.
    """
    with _autocast(batch, precision):
        sums: LossSums = model(batch, "loss_sums")
    return sums


def _autocast(batch: UnpaddedBatch, precision: Precision) -> torch.autocast:
    device = batch.input_ids.device.type
    return torch.autocast(device, torch.bfloat16, enabled=precision == "bf16_autocast")
