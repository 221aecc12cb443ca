"""The fine-tuning loop: the same for every engine.

An update is: its microbatches through the engine, the gradients' norm limited, AdamW. Some updates
are computed in two halves to measure the gradient's noise, some of a pipeline with a clock; those,
and the first, are left out of the rate of training.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch

from bert_tools.squad.bubble import StageClock, StageEvent
from bert_tools.squad.engines.contract import Engine, MakeBatch, Team
from bert_tools.squad.microbatches import UpdatePlan
from bert_tools.squad.settings import SquadSettings
from bert_tools.squad.update import Outcome, Squares, Updater
from mlperf_bert.optim.noise_scale import NoiseScale, covariance_trace, gradient_square

CLOCKED_UPDATES = 3  # of a pipeline, at most
Shown = Callable[[int, Outcome], None]


@dataclass(slots=True)
class TrainingLog:
    """What happened in training; lists have an entry for each update."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    step_seconds: list[float | None] = field(default_factory=list)  # None: not a plain update
    skipped: int = 0
    noise: list[dict[str, float]] = field(default_factory=list)
    noise_scale: NoiseScale = field(default_factory=NoiseScale)  # preconditioned
    plain_noise_scale: NoiseScale = field(default_factory=NoiseScale)
    clocked: list[list[StageEvent]] = field(default_factory=list)  # this rank's, by update
    stopped_by: str | None = None  # the signal that ended it

    def samples_per_s(self, global_batch: int) -> float | None:
        """Windows a second of the updates that count; None where none does."""
        counted = [seconds for seconds in self.step_seconds if seconds is not None]
        return global_batch * len(counted) / sum(counted) if counted else None


class Loop:
    """Trains an engine's model by a plan.

    Args:
        settings: of the run.
        engine: with the weights to begin with.
        team: its ranks.
        plan: of the updates.
        make: microbatches of it.
        clock: of a pipeline's stages, else unused.
    """

    def __init__(
        self,
        settings: SquadSettings,
        engine: Engine,
        team: Team,
        plan: UpdatePlan,
        make: MakeBatch,
        clock: StageClock,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._team = team
        self._plan = plan
        self._make = make
        self._clock = clock
        self._updater = Updater(settings, engine, team, plan.num_updates)
        self.log = TrainingLog()

    @property
    def num_updates(self) -> int:
        """Of the plan."""
        return self._plan.num_updates

    def run(
        self,
        shown: Shown = lambda update, outcome: None,
        stopped: Callable[[int], str | None] = lambda update: None,
    ) -> TrainingLog:
        """Make all updates of the plan.

        Args:
            shown: told of each update.
            stopped: asked after each update, on every rank: the signal after which all end.
        """
        clocked = self._clocked_updates()
        for update in range(1, self._plan.num_updates + 1):
            begun = perf_counter()
            for part in self._engine.parts:
                part.update.fill_(update)
            is_plain = update > 1
            if self._measures_noise(update):
                is_plain = False
                outcome = self._in_halves(update)
            elif update in clocked:
                is_plain = False
                outcome = self._with_clock(update)
            else:
                outcome = self._plain(update)
            self.log.step_seconds.append(perf_counter() - begun if is_plain else None)
            self._note(update, outcome)
            shown(update, outcome)
            self.log.stopped_by = stopped(update)
            if self.log.stopped_by:
                break
        return self.log

    def _note(self, update: int, outcome: Outcome) -> None:
        self.log.losses.append(outcome.loss)
        self.log.grad_norms.append(outcome.grad_norm)
        self.log.skipped += outcome.skipped

    def _measures_noise(self, update: int) -> bool:
        """Not in the warm-up: Adam's second moments are not yet known, or of one gradient alone."""
        every = self._settings.noise_every
        warm_up = max(1, round(self._settings.warmup * self.num_updates))
        return every > 0 and update > warm_up and update % every == 0

    def _clocked_updates(self) -> frozenset[int]:
        """The last of a pipeline that measure nothing else: of ten updates one."""
        if self._settings.engine.kind != "pipeline":
            return frozenset()
        number = self._plan.num_updates
        plain = [each for each in range(2, number + 1) if not self._measures_noise(each)]
        return frozenset(plain[len(plain) - min(CLOCKED_UPDATES, max(1, number // 10)) :])

    def _accumulate(self, update: int, first: int, end: int) -> torch.Tensor:
        rows = list(self._plan.windows[update - 1, first:end])
        return self._engine.accumulate(rows, self._make, float(self._settings.global_batch))

    def _plain(self, update: int) -> Outcome:
        share = self._accumulate(update, 0, self._settings.microbatches)
        return self._updater.finish(update, share)

    def _with_clock(self, update: int) -> Outcome:
        self._clock.start(self._meet())
        share = self._accumulate(update, 0, self._settings.microbatches)
        self.log.clocked.append(self._clock.stop())
        return self._updater.finish(update, share)

    def _meet(self) -> float:
        """Wait for all ranks; what rank 0's clock says then, or just before."""
        is_first = self._team.replica == self._team.stage == 0
        device = self._engine.parts[0].device
        self._team.sum(torch.zeros(1, device=device)).item()
        now = torch.tensor(perf_counter() if is_first else 0.0, dtype=torch.float64, device=device)
        return float(self._team.sum(now).item())

    def _in_halves(self, update: int) -> Outcome:
        """The same update, and the squared norms of its halves' mean gradients and of its own."""
        count, batch = self._settings.microbatches, self._settings.global_batch
        half = count // 2
        share = self._accumulate(update, 0, half)
        first = self._updater.squares(2.0)
        of_first_half = self._updater.copy_of_gradients()
        share = share + self._accumulate(update, half, count)
        second = self._updater.squares(2.0, less=of_first_half)
        self._note_noise(update, (first, second), self._updater.squares(1.0), batch)
        return self._updater.finish(update, share)

    def _note_noise(
        self, update: int, halves: tuple[Squares, Squares], all_of_it: Squares, batch: int
    ) -> None:
        small = {
            "": (halves[0].plain + halves[1].plain) / 2,
            "preconditioned_": (halves[0].preconditioned + halves[1].preconditioned) / 2,
        }
        big = {"": all_of_it.plain, "preconditioned_": all_of_it.preconditioned}
        scales = {"": self.log.plain_noise_scale, "preconditioned_": self.log.noise_scale}
        noted: dict[str, float] = {"update": update}
        for kind, scale in scales.items():
            batches = (small[kind], batch / 2, big[kind], float(batch))
            if not all(math.isfinite(each) for each in batches):
                return
            scale.add(*batches)
            noted[f"{kind}gradient_square"] = gradient_square(*batches)
            noted[f"{kind}trace"] = covariance_trace(*batches)
        self.log.noise.append(noted)
