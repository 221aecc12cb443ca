"""Run the fine-tuning loop, which is the same for every engine.

In each update, the engine computes the gradients of the micro-batches, the loop clips them, and
AdamW changes the weights. Some updates are computed in two halves to measure the gradient noise
scale. Some updates of a pipeline are timed stage by stage. The training rate excludes these updates
and the first one. Each rank computes the norm of its own elements, and the squares of these norms
are summed over the ranks.
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
WARM_UP = 0.1  # fraction of updates in which the learning rate rises, as in BERT's program
CLOCKED_UPDATES = 3  # maximum number of timed updates of a pipeline


@dataclass(slots=True)
class TrainingLog:
    """Measurements of a training run. `losses` and `grad_norms` have one entry per update."""

    losses: list[float] = field(default_factory=list)  # means over samples, in nats
    grad_norms: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)  # only updates that count
    noise: list[dict[str, float]] = field(default_factory=list)
    clocked: list[list[Span]] = field(default_factory=list)  # spans of this rank, by update
    stopped_by: str | None = None  # the signal that stopped the training

    def samples_per_s(self, global_batch: int) -> float | None:
        """Return the number of windows trained per second, or None if no update counts.

        The first update, timed updates and updates that measure noise do not count.
        """
        seconds = self.plain_seconds
        return global_batch * len(seconds) / sum(seconds) if seconds else None


def clocked_updates(plain: Sequence[int], num_updates: int) -> Sequence[int]:
    """Return the updates of a pipeline to time: the last ones of `plain`.

    `plain` are the updates that neither come first nor measure noise. At most one update in ten is
    timed, or one of fewer than ten. Another plain update always remains for the training rate.
    """
    count = min(CLOCKED_UPDATES, max(1, num_updates // 10), len(plain) - 1)
    return plain[-count:] if count > 0 else ()


class Loop:
    """A training loop, which trains an engine's model on the updates of a plan.

    The optimizer is torch's AdamW (arXiv 1711.05101) with linear warm-up and decay of the learning
    rate, and with gradient clipping by the global norm. Biases and LayerNorm parameters have no
    weight decay. `engine` has the initial weights, and `make` builds a micro-batch from window
    numbers. Only the engine `pipeline` uses `clock`.
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
        self._warm_up = max(1, round(WARM_UP * self.num_updates))  # so that a rate is the given one
        # One more step than there are updates, so that the rate of the last update is not zero.
        self._schedule = ScheduleSection(
            decay_steps=self.num_updates + 1, warmup_steps=self._warm_up
        )

    def run(
        self,
        shown: Callable[[int, float], object] = lambda update, loss: None,
        stopped: Callable[[int], str | None] = lambda update: None,
    ) -> TrainingLog:
        """Run all updates of the plan, and return their measurements.

        After each update, the loop calls `shown` with the number and the loss of the update. Then
        it calls `stopped` on every rank. If `stopped` returns the name of a signal, the training
        stops.
        """
        plain = [each for each in range(2, self.num_updates + 1) if not self._measures_noise(each)]
        is_pipeline = self._settings.engine.kind == "pipeline"
        clocked = clocked_updates(plain, self.num_updates) if is_pipeline else ()
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
        """Clip the gradients, apply update number `update` (from 1) and return its loss.

        `share_of_loss` is this rank's share of the loss, from `Replicated.accumulate`. One small
        all-reduce gives all ranks the same loss and norm, so that they all clip or stop in the same
        way. Raises ConfigError on all ranks if the training diverged.
        """
        numbers = torch.stack([share_of_loss, self._own_square(self._gradients())])
        loss, square = self._mesh.sum(numbers).tolist()  # the only wait for the device
        if not math.isfinite(square):
            problem = (
                f"is {self._settings.learning_rate:g}, but the training diverged, because the "
                f"gradient of update {update} is not finite"
            )
            error = ConfigError("--learning-rate", problem, "lower --learning-rate")
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
        """Return whether the update measures the gradient noise scale.

        Updates of the warm-up do not, because the noise changes too fast during the warm-up.
        """
        every = self._settings.noise_every
        return every > 0 and update > self._warm_up and update % every == 0

    def _accumulate(self, update: int, first: int, end: int) -> Tensor:
        """Accumulate gradients of an update's micro-batches `first` to `end` (exclusive)."""
        rows = list(self._plan.windows[update - 1, first:end])
        return self._engine.accumulate(rows, self._make, float(self._settings.global_batch))

    def _meet(self) -> float:
        """Wait for all ranks, and return the time on rank 0's clock just after this rendezvous."""
        device = self._engine.parts[0].device
        self._mesh.sum(torch.zeros(1, device=device)).item()
        seconds = perf_counter() if self._mesh.rank == 0 else 0.0
        now = torch.tensor(seconds, dtype=torch.float64, device=device)
        return float(self._mesh.sum(now).item())

    def _in_halves(self, update: int) -> Tensor:
        """Compute an update in two halves, and log the noise estimates from their gradients.

        Returns this rank's share of the loss.
        """
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
        """Return the squared norm of factor * (gradients - `less`), over the whole model.

        All ranks must call this function.
        """
        gradients = self._gradients()
        if less is not None:
            gradients = [each - other for each, other in zip(gradients, less, strict=True)]
        return float(self._mesh.sum(self._own_square(gradients)).item() * factor**2)

    def _gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's elements, in the order of the parameters."""
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        return [each.to_local() if isinstance(each, DTensor) else each for each in gradients]

    def _own_square(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return this rank's share of the whole model's squared norm, float64.

        The square is divided by the number of ranks that store the same elements, so that the sum
        over all ranks counts each element once.
        """
        norms = torch.stack(torch._foreach_norm(list(tensors))).double()
        return norms.square().sum() / self._engine.copies
