"""The factor that lifts fp16 gradients above what fp16 rounds to zero, adjusted while training.

Source: Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3.2: halved
where a gradient overflowed and the step was skipped, doubled after so many steps without.
"""

import torch
from torch import Tensor


class LossScale:
    """Lives in tensors on the device; the host reads none of them.

    Args:
        initial: factor of the first step; 1 for ever where `growth_steps` is None.
        growth_steps: updates in a row after which it doubles.
    """

    def __init__(self, initial: float, growth_steps: int | None, device: torch.device) -> None:
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self._since_change = torch.zeros((), dtype=torch.int32, device=device)
        self._growth_steps = growth_steps

    def of(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss if self._growth_steps is None else loss * self.scale

    def update(self, skip: Tensor) -> None:
        """After a step; `skip` (0-d float32) is 1.0 where it was skipped."""
        if self._growth_steps is not None:
            torch._amp_update_scale_(
                self.scale, self._since_change, skip, 2.0, 0.5, self._growth_steps
            )

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors themselves; none where the loss is not scaled."""
        if self._growth_steps is None:
            return {}
        return {"loss_scale": self.scale, "steps_since_loss_scale_changed": self._since_change}


def no_loss_scale(device: torch.device) -> LossScale:
    """For precisions with the range of float32."""
    return LossScale(1.0, None, device)
