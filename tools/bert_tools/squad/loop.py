"""The fine-tuning loop: the same for every engine.

An update runs its microbatches through the engine, limits the gradients' norm and applies AdamW.
Some updates are computed in two halves to measure the gradient's noise, some of a pipeline's with a
clock; those, and the first, are left out of the rate of training. Norms are taken over the elements
that this rank holds, and summed over the ranks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from bert_tools.squad.batches import UpdatePlan
from bert_tools.squad.bubble import Span, StageClock
from bert_tools.squad.engines import REPLICA, Engine, MakeBatch
from bert_tools.squad.settings import SquadSettings
from mlperf_bert.config.sections import ScheduleSection
from mlperf_bert.optim.flat_optimizer import is_exempt
from mlperf_bert.optim.noise_meter import preconditioner
from mlperf_bert.optim.noise_scale import NoiseScale, covariance_trace, gradient_square
from mlperf_bert.optim.schedule import learning_rate

BETAS = (0.9, 0.999)
CLOCKED_UPDATES = 3  # clocked updates of a pipeline, at most


class Squares(NamedTuple):
    """Squared norms of a gradient over all of the model's elements, on every rank alike.

    `preconditioned` is that of the gradient times Adam's scale of each element, with the second
    moments before the update.
    """

    plain: float
    preconditioned: float


@dataclass(slots=True)
class TrainingLog:
    """Log of the training; the first three lists have an entry for each update."""

    losses: list[float] = field(default_factory=list)  # means, in nats
    grad_norms: list[float] = field(default_factory=list)
    step_seconds: list[float | None] = field(default_factory=list)  # None: not a plain update
    skipped: int = 0
    noise: list[dict[str, float]] = field(default_factory=list)
    noise_scale: NoiseScale = field(default_factory=NoiseScale)  # preconditioned
    plain_noise_scale: NoiseScale = field(default_factory=NoiseScale)
    clocked: list[list[Span]] = field(default_factory=list)  # this rank's, by update
    stopped_by: str | None = None  # the signal that ended it

    def samples_per_s(self, global_batch: int) -> float | None:
        """Windows per second over the updates that count; None if none does."""
        counted = [seconds for seconds in self.step_seconds if seconds is not None]
        return global_batch * len(counted) / sum(counted) if counted else None


class Loop:
    """Trains an engine's model by a plan.

    AdamW has linear warm-up and decay, and gradient clipping by the global norm (arXiv 1711.05101;
    torch's own, which computes many tensors at a time). Biases and LayerNorm parameters take no
    decay.

    `engine` has the first weights; `make` makes microbatches of the plan; only a pipeline's stages
    use `clock`.
    """

    def __init__(
        self,
        settings: SquadSettings,
        engine: Engine,
        plan: UpdatePlan,
        make: MakeBatch,
        clock: StageClock,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._team = engine.team
        self._plan = plan
        self._make = make
        self._clock = clock
        self.log = TrainingLog()
        self.num_updates = len(plan.windows)
        decayed: list[Tensor] = []
        exempt: list[Tensor] = []
        for part in engine.parts:
            for name, parameter in part.named_parameters():
                (exempt if is_exempt(name) else decayed).append(parameter)
        self._parameters = [*decayed, *exempt]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": exempt, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=BETAS,
            eps=settings.epsilon,
            foreach=True,
        )
        self._warm_up = round(settings.warmup * self.num_updates)
        # One more than there are, so that the last update's rate is not zero.
        self._schedule = ScheduleSection(
            decay_steps=self.num_updates + 1, warmup_steps=self._warm_up
        )

    def run(
        self,
        shown: Callable[[int, float], object] = lambda update, loss: None,
        stopped: Callable[[int], str | None] = lambda update: None,
    ) -> TrainingLog:
        """Make all updates of the plan.

        `shown` is told of each; `stopped` is asked after each, on every rank, for the signal that
        ends them all.
        """
        clocked = self._clocked_updates()
        for update in range(1, self.num_updates + 1):
            begun = perf_counter()
            for part in self._engine.parts:
                part.update.fill_(update)
            if self._measures_noise(update):
                share = self._in_halves(update)
            elif update in clocked:
                self._clock.start(self._meet())
                share = self._accumulate(update, 0, self._settings.microbatches)
                self.log.clocked.append(self._clock.stop())
            else:
                share = self._accumulate(update, 0, self._settings.microbatches)
            loss = self.finish(update, share)
            is_plain = update > 1 and update not in clocked and not self._measures_noise(update)
            self.log.step_seconds.append(perf_counter() - begun if is_plain else None)
            shown(update, loss)
            self.log.stopped_by = stopped(update)
            if self.log.stopped_by:
                break
        return self.log

    def finish(self, update: int, share_of_loss: Tensor) -> float:
        """Clip and apply update `update` (from 1) if gradients are finite; returns its loss.

        `share_of_loss` is this rank's, from `Replicated.accumulate`. One small all-reduce gives all
        ranks loss and norm, so that they all do the same.
        """
        numbers = torch.stack([share_of_loss, self._own_square(self._gradients())])
        loss, square = self._team.sum(numbers).tolist()  # the host waits for the device, once
        norm = square**0.5 if square >= 0 else float("nan")
        skipped = not square < float("inf")
        if not skipped:
            limit = self._settings.max_grad_norm
            if limit and norm > limit:
                torch._foreach_mul_(self._gradients(), limit / norm)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate(update, self._schedule, self._settings.learning_rate)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.log.losses.append(loss)
        self.log.grad_norms.append(norm)
        self.log.skipped += skipped
        return float(loss)

    def _measures_noise(self, update: int) -> bool:
        """True if the update measures noise; the warm-up has no good second moments of Adam yet."""
        every = self._settings.noise_every
        return every > 0 and update > max(1, self._warm_up) and update % every == 0

    def _clocked_updates(self) -> frozenset[int]:
        """A pipeline's updates with a clock: the last that measure nothing else, one of ten."""
        if self._settings.engine.kind != "pipeline":
            return frozenset()
        number = self.num_updates
        plain = [each for each in range(2, number + 1) if not self._measures_noise(each)]
        return frozenset(plain[len(plain) - min(CLOCKED_UPDATES, max(1, number // 10)) :])

    def _accumulate(self, update: int, first: int, end: int) -> Tensor:
        rows = list(self._plan.windows[update - 1, first:end])
        return self._engine.accumulate(rows, self._make, float(self._settings.global_batch))

    def _meet(self) -> float:
        """Wait for all ranks; returns rank 0's clock then, or just before."""
        device = self._engine.parts[0].device
        self._team.sum(torch.zeros(1, device=device)).item()
        seconds = perf_counter() if self._team.is_first else 0.0
        now = torch.tensor(seconds, dtype=torch.float64, device=device)
        return float(self._team.sum(now).item())

    def _in_halves(self, update: int) -> Tensor:
        """Compute an update in halves; also squared norms of their mean gradients and its own."""
        count = self._settings.microbatches
        share = self._accumulate(update, 0, count // 2)
        first = self._squares(2.0)
        of_first_half = [each.clone() for each in self._gradients()]
        share = share + self._accumulate(update, count // 2, count)
        second = self._squares(2.0, less=of_first_half)
        self._note_noise(update, (first, second), self._squares(1.0))
        return share

    def _note_noise(self, update: int, halves: tuple[Squares, Squares], big: Squares) -> None:
        batch = float(self._settings.global_batch)
        small = [(one + other) / 2 for one, other in zip(*halves, strict=True)]
        scales = (("", self.log.plain_noise_scale), ("preconditioned_", self.log.noise_scale))
        noted: dict[str, float] = {"update": update}
        for (kind, scale), of_half, of_all in zip(scales, small, big, strict=True):
            batches = (of_half, batch / 2, of_all, batch)
            if not all(math.isfinite(each) for each in batches):
                return
            scale.add(*batches)
            noted[f"{kind}gradient_square"] = gradient_square(*batches)
            noted[f"{kind}trace"] = covariance_trace(*batches)
        self.log.noise.append(noted)

    def _squares(self, factor: float, less: Sequence[Tensor] | None = None) -> Squares:
        """Squares of factor * (gradients of this update so far - those before)."""
        gradients = self._gradients()
        if less is not None:
            gradients = [each - other for each, other in zip(gradients, less, strict=True)]
        scaled = torch._foreach_mul(gradients, self._preconditioners())
        both = torch.stack([self._own_square(gradients), self._own_square(scaled)])
        return Squares(*(self._team.sum(both) * factor**2).tolist())

    def _gradients(self) -> list[Tensor]:
        """Gradients of this rank's elements, in the order of the parameters."""
        return [_local(each.grad) for each in self._parameters if each.grad is not None]

    def _own_square(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's share of a squared norm, float64; other ranks hold copies of its elements."""
        norms = torch.stack(torch._foreach_norm(list(tensors))).double()
        return norms.square().sum() / self._engine.copies

    def _preconditioners(self) -> list[Tensor]:
        """Adam's scale of each gradient (`optim/noise_meter.py`); zeros before the first update."""
        with_gradient = [each for each in self._parameters if each.grad is not None]
        states = [self._optimizer.state[each] for each in with_gradient]
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
        """Means of whole tensors `of`, of which this rank may hold only a part."""
        sums = torch.stack([each.sum() for each in tensors])
        group = self._team.group(REPLICA)
        if group is not None and any(isinstance(each, DTensor) for each in of):
            dist.all_reduce(sums, group=group)
        return sums / sums.new_tensor([each.numel() for each in of])


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, whole or cut over ranks."""
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
        return local
    return tensor
