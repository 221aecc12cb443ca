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

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bert_tools.squad.batches import UpdatePlan
from bert_tools.squad.engines import Engine, MakeBatch
from bert_tools.squad.measures import Span, StageClock, covariance_trace, gradient_square
from bert_tools.squad.settings import SquadSettings
from mlperf_bert.config.sections import ScheduleSection
from mlperf_bert.errors import ConfigError
from mlperf_bert.optim.flat_optimizer import is_exempt
from mlperf_bert.optim.schedule import learning_rate

BETAS = (0.9, 0.999)
EPSILON = 1e-6
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0
WARM_UP = 0.1  # share of the updates in which the learning rate rises, as in BERT's program
CLOCKED_UPDATES = 3  # clocked updates of a pipeline, at most


@dataclass(slots=True)
class TrainingLog:
    """Log of the training; losses and norms have an entry for each update."""

    losses: list[float] = field(default_factory=list)  # means, in nats
    grad_norms: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)  # of the updates that count
    noise: list[dict[str, float]] = field(default_factory=list)
    clocked: list[list[Span]] = field(default_factory=list)  # this rank's, by update
    stopped_by: str | None = None  # the signal that ended it

    def samples_per_s(self, global_batch: int) -> float | None:
        """Windows per second over the updates that count; None if none does."""
        seconds = self.plain_seconds
        return global_batch * len(seconds) / sum(seconds) if seconds else None


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
        self._mesh = engine.mesh
        self._plan = plan
        self._make = make
        self._clock = clock
        self.log = TrainingLog()
        self.num_updates = len(plan.windows)
        named = [pair for part in engine.parts for pair in part.named_parameters()]
        decayed = [parameter for name, parameter in named if not is_exempt(name)]
        exempt = [parameter for name, parameter in named if is_exempt(name)]
        self._parameters = [*decayed, *exempt]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": WEIGHT_DECAY},
                {"params": exempt, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=BETAS,
            eps=EPSILON,
            foreach=True,
        )
        self._warm_up = round(WARM_UP * self.num_updates)
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
            loss = self._finish(update, share)
            if update > 1 and update not in clocked and not self._measures_noise(update):
                self.log.plain_seconds.append(perf_counter() - begun)
            shown(update, loss)
            self.log.stopped_by = stopped(update)
            if self.log.stopped_by:
                break
        return self.log

    def _finish(self, update: int, share_of_loss: Tensor) -> float:
        """Clip and apply update `update` (from 1); returns its loss.

        `share_of_loss` is this rank's, from `Replicated.accumulate`. One small all-reduce gives all
        ranks loss and norm, so that they all do the same.
        """
        numbers = torch.stack([share_of_loss, self._own_square(self._gradients())])
        loss, square = self._mesh.sum(numbers).tolist()  # the host waits for the device, once
        if not math.isfinite(square):
            problem = (
                f"is {self._settings.learning_rate:g}, and the training diverged: the gradient "
            )
            problem += f"of update {update} is not finite"
            error = ConfigError("--learning-rate", problem, "lower it")
            error.is_of_all_ranks = True
            raise error
        norm = square**0.5
        if norm > MAX_GRAD_NORM:
            torch._foreach_mul_(self._gradients(), MAX_GRAD_NORM / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(update, self._schedule, self._settings.learning_rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.log.losses.append(loss)
        self.log.grad_norms.append(norm)
        return float(loss)

    def _measures_noise(self, update: int) -> bool:
        """True if the update measures noise; in the warm-up it falls too fast."""
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
        self._mesh.sum(torch.zeros(1, device=device)).item()
        seconds = perf_counter() if self._mesh.rank == 0 else 0.0
        now = torch.tensor(seconds, dtype=torch.float64, device=device)
        return float(self._mesh.sum(now).item())

    def _in_halves(self, update: int) -> Tensor:
        """Compute an update in halves; also squared norms of their mean gradients and its own."""
        count = self._settings.microbatches
        share = self._accumulate(update, 0, count // 2)
        first = self._square(2.0)
        of_first_half = [each.clone() for each in self._gradients()]
        share = share + self._accumulate(update, count // 2, count)
        second = self._square(2.0, less=of_first_half)
        batch = float(self._settings.global_batch)
        batches = ((first + second) / 2, batch / 2, self._square(1.0), batch)
        found = {"gradient_square": gradient_square(*batches), "trace": covariance_trace(*batches)}
        self.log.noise.append({"update": update, **found})
        return share

    def _square(self, factor: float, less: Sequence[Tensor] | None = None) -> float:
        """The whole model's squared norm of factor * (gradients of this update - those before)."""
        gradients = self._gradients()
        if less is not None:
            gradients = [each - other for each, other in zip(gradients, less, strict=True)]
        return float(self._mesh.sum(self._own_square(gradients)).item() * factor**2)

    def _gradients(self) -> list[Tensor]:
        """Gradients of this rank's elements, in the order of the parameters."""
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        return [each.to_local() if isinstance(each, DTensor) else each for each in gradients]

    def _own_square(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's share of a squared norm, float64; other ranks hold copies of its elements."""
        norms = torch.stack(torch._foreach_norm(list(tensors))).double()
        return norms.square().sum() / self._engine.copies
