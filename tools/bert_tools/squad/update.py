"""What happens to the gradients of an update: their noise, the limit of their norm, AdamW.

The same for every engine: it looks at the elements that this rank holds, and sums over the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from bert_tools.squad.engines.contract import REPLICA, Engine, Team, named_parameters
from bert_tools.squad.settings import SquadSettings
from mlperf_bert.config.sections import ScheduleSection
from mlperf_bert.optim.flat_optimizer import is_exempt
from mlperf_bert.optim.noise_meter import preconditioner
from mlperf_bert.optim.schedule import learning_rate

BETAS = (0.9, 0.999)


@dataclass(frozen=True, slots=True)
class Squares:
    """Squared norms of a gradient over all of the model's elements, on every rank alike.

    `preconditioned` is of the gradient times what Adam scales its elements by, with the second
    moments from before the update.
    """

    plain: float
    preconditioned: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of an update: its mean loss in nats, the gradient's norm, whether it was made."""

    loss: float
    grad_norm: float
    skipped: bool


class Updater:
    """AdamW with linear warm-up and decay, and gradient clipping by the global norm.

    (AdamW: arXiv 1711.05101; torch's own, which computes many tensors at a time.) Biases and
    LayerNorm parameters take no decay.
    """

    def __init__(self, settings: SquadSettings, engine: Engine, team: Team, updates: int) -> None:
        self._settings = settings
        self._engine = engine
        self._team = team
        decayed: list[Tensor] = []
        exempt: list[Tensor] = []
        for name, parameter in named_parameters(engine.parts):
            (exempt if is_exempt(name) else decayed).append(parameter)
        self._parameters = [*decayed, *exempt]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": exempt, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=BETAS,
            eps=settings.epsilon,
            foreach=True,
        )
        # One more than there are, so that the last update is not made with a rate of zero.
        self._schedule = ScheduleSection(
            decay_steps=updates + 1, warmup_steps=round(settings.warmup * updates)
        )

    def finish(self, update: int, share_of_loss: Tensor) -> Outcome:
        """Clip, and make update number `update` (from 1), unless a gradient is not finite.

        `share_of_loss` is this rank's, as `Engine.accumulate` gives it. One small all-reduce makes
        loss and norm known to all ranks, so that all of them do the same.
        """
        numbers = torch.stack([share_of_loss, self._own_square(self._gradients())])
        loss, square = self._team.sum(numbers).tolist()  # the host waits for the device, once
        norm = square**0.5 if square >= 0 else float("nan")
        skipped = not square < float("inf")
        if not skipped:
            limit = self._settings.max_grad_norm
            if limit and norm > limit:
                torch._foreach_mul_(self._gradients(), limit / norm)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(update, self._schedule, self._settings.learning_rate)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Outcome(loss, norm, skipped)

    def copy_of_gradients(self) -> list[Tensor]:
        """What this rank holds of the gradients now."""
        return [each.clone() for each in self._gradients()]

    def squares(self, factor: float, less: Sequence[Tensor] | None = None) -> Squares:
        """Of factor * (the gradients, less some others of a `copy_of_gradients`)."""
        gradients = self._gradients()
        if less is not None:
            gradients = [each - other for each, other in zip(gradients, less, strict=True)]
        scaled = torch._foreach_mul(gradients, self._preconditioners())
        both = torch.stack([self._own_square(gradients), self._own_square(scaled)])
        plain, preconditioned = (self._team.sum(both) * factor**2).tolist()
        return Squares(plain, preconditioned)

    def _gradients(self) -> list[Tensor]:
        """Of this rank's elements, in the order of the parameters."""
        return [_local(each.grad) for each in self._parameters if each.grad is not None]

    def _own_square(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's share of a squared norm, float64: other ranks hold copies of its elements."""
        norms = torch.stack(torch._foreach_norm(list(tensors))).double()
        return norms.square().sum() / self._engine.copies

    def _preconditioners(self) -> list[Tensor]:
        """Of each gradient (`optim/noise_meter.py`); zeros before the first update."""
        with_gradient = [each for each in self._parameters if each.grad is not None]
        states = [self.optimizer.state[each] for each in with_gradient]
        if not all(states):
            return [torch.zeros_like(_local(each)) for each in with_gradient]
        moments = [_local(state["exp_avg_sq"]) for state in states]
        correction = moments[0].new_tensor(1 - BETAS[1] ** float(states[0]["step"]))
        found = []
        for moment, mean in zip(moments, self._means(moments, with_gradient), strict=True):
            least = (1 - BETAS[1]) * mean
            found.append(preconditioner(moment, least, correction, self._settings.epsilon))
        return found

    def _means(self, tensors: Sequence[Tensor], of: Sequence[Tensor]) -> Tensor:
        """Of whole tensors, of which this rank may hold a part; `of` are the whole ones."""
        sums = torch.stack([each.sum() for each in tensors])
        group = self._team.group(REPLICA)
        if group is not None and any(isinstance(each, DTensor) for each in of):
            dist.all_reduce(sums, group=group)
        return sums / sums.new_tensor([each.numel() for each in of])


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, whole or cut over ranks."""
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
        return local
    return tensor
