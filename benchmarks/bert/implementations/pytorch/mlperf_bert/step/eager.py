"""One optimizer update: forward and backward per micro-batch, clip, schedule, update. No host sync.

The learning rate, the count of updates and the decision to skip one live in tensors on the device.
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
    """Runs one update of `model` (bare, or wrapped in DistributedDataParallel) when called.

    `learning_rates` [steps + 1] float64 on the model's device holds the rate of each step from 1;
    element 0 is not used. `step` int64 [1] is the bare model's own step number.
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
        """Begin the run phase, for which an eager step needs nothing."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: an eager step holds nothing."""

    def prepare(self, batch_of: MakeBatch) -> None:
        """Do nothing: an eager step needs no capture."""

    def __call__(self, step: int, micro_batches: tuple[UnpaddedBatch, ...]) -> StepResult:
        """Make the update of step number `step`, counted from 1.

        If a gradient is not finite, no rank updates: weights, moments and the count for their bias
        correction do not change. The schedule follows the step's number, which advances.
        """
        self.number.fill_(step)
        return self.update(micro_batches)

    def update(self, micro_batches: tuple[UnpaddedBatch, ...]) -> StepResult:
        """Make the update of the step whose number was set, by device operations only."""
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
        """Add one micro-batch's gradients; the last one averages them over the ranks."""
        with self._clip.forward(is_last=is_last):
            sums = training_loss_sums(self.model, batch, self._precision)
            loss = pretraining_loss(sums, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def weights_dtype(precision: Precision, otherwise: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype of the model's weights and gradients; `otherwise` if the precision rounds none."""
    return torch.bfloat16 if precision in ("bf16", "fp8") else otherwise


def forward(model: nn.Module, batch: UnpaddedBatch, precision: Precision) -> PretrainingLogits:
    """The model's logits, in the dtype of its weights or under autocast, as `precision` says."""
    with _autocast(batch, precision):
        logits: PretrainingLogits = model(batch)
    return logits


def training_loss_sums(model: nn.Module, batch: UnpaddedBatch, precision: Precision) -> LossSums:
    """The model's summed losses, computed like `forward`; it need not hold all logits at once."""
    with _autocast(batch, precision):
        sums: LossSums = model(batch, "loss_sums")
    return sums


def _autocast(batch: UnpaddedBatch, precision: Precision) -> torch.autocast:
    device = batch.input_ids.device.type
    return torch.autocast(device, torch.bfloat16, enabled=precision == "bf16_autocast")
