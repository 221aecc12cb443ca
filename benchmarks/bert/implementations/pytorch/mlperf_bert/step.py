"""One optimizer update: forward and backward per micro-batch, clip, schedule, update. No host sync.

The model's weights stay fp32; under `bf16` the forward runs in autocast.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.distributed.clip_hook import ClipOutcome
from mlperf_bert.distributed.clipping import Clipping
from mlperf_bert.model.heads import PretrainingLogits, loss_sums, pretraining_loss


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step leaves behind, still on the device."""

    loss: Tensor  # this rank's share; the mean over ranks is the loss of the update
    clip: ClipOutcome
    learning_rate: float


class EagerStep:
    """Runs one update of `model` (bare, or wrapped in DistributedDataParallel) when called."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        learning_rate: Callable[[int], float],
        clip: Clipping,
        precision: Literal["fp32", "bf16"],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._clip = clip
        self._precision = precision

    def __call__(self, step: int, micro_batches: tuple[UnpaddedBatch, ...]) -> StepResult:
        """Update once, as step number `step` counted from 1.

        Where a gradient is not finite, no rank updates: an optimizer that reads `found_inf` leaves
        weights, moments and the count behind their bias correction as they are. The schedule goes
        by the step's number, which advances.
        """
        self._optimizer.zero_grad()
        losses = [
            self._backward(batch, is_last=index == len(micro_batches) - 1)
            for index, batch in enumerate(micro_batches)
        ]
        outcome = self._clip.finish()
        learning_rate = self._learning_rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.found_inf = outcome.skip  # type: ignore[attr-defined]  # torch's own way
        self._optimizer.step()
        return StepResult(torch.stack(losses).sum(), outcome, learning_rate)

    def _backward(self, batch: UnpaddedBatch, *, is_last: bool) -> Tensor:
        """Add one micro-batch's gradients; the last one averages them over the ranks."""
        with self._clip.forward(is_last=is_last):
            loss = pretraining_loss(
                loss_sums(forward(self._model, batch, self._precision), batch), batch
            )
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def forward(
    model: nn.Module, batch: UnpaddedBatch, precision: Literal["fp32", "bf16"]
) -> PretrainingLogits:
    """The model's logits, computed in the configured precision."""
    device = batch.input_ids.device.type
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
        logits: PretrainingLogits = model(batch)
    return logits
