"""The work of one process on a study: claim a trial, train, judge, tell; then fresh seeds.

Several processes do the same side by side; nobody is their master.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bert_tools.tune.objective import Curve, Ended, read_measured, samples_to, value_of
from bert_tools.tune.progress import StudyProgress
from bert_tools.tune.settings import Arm, StudySettings
from bert_tools.tune.space import Value, draw
from bert_tools.tune.standing import best_trial, in_words, missing_repeats
from bert_tools.tune.stop_signal import StopSignal
from bert_tools.tune.store import REPEATS, Store, TrialRecord
from bert_tools.tune.trial_process import DEFAULT_TRAINER, TrialProcess, last_line
from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.errors import (
    MISTAKE,
    STOPPED,
    TARGET_MISSED,
    ConfigError,
    DataError,
    UserError,
)
from mlperf_bert.config.files import config_to_toml
from mlperf_bert.config.run_config import RunConfig

if TYPE_CHECKING:
    from optuna import Trial

WAIT_S = 1.0
MOST_FAILURES = 3  # one after the other, of trainings that end in disorder


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training that this process has claimed; `config` is None for values that contradict."""

    arm: str
    trial: "Trial"
    directory: Path
    config: RunConfig | None
    problem: str
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How many trials an arm gets, and fresh seeds each of the contenders afterwards."""

    trials: int
    repeats: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """How a training ended and what it counts; `value` None for one that cannot be judged."""

    ended: Ended
    value: float | None
    samples: int | None = None
    seconds: float | None = None
    curve: Curve = ()
    why: str = ""


class Search:
    """Takes part in a study until all is done or a signal comes."""

    def __init__(
        self,
        settings: StudySettings,
        store: Store,
        budget: Budget,
        progress: StudyProgress,
        stop: StopSignal,
    ) -> None:
        self._settings = settings
        self._store = store
        self._budget = budget
        self._progress = progress
        self._stop = stop
        self._failures = 0

    def work(self) -> Literal["done", "stopped"]:
        """Train until nothing is left to do. Raises UserError where training cannot work at all."""
        while not self._stop.came:
            with self._store.locked():
                for name in self._store.give_up_lost():
                    self._progress.line(f"{name}: was interrupted, and is repeated")
                job = self._claim()
                is_done = job is None and not self._others_train()
            if is_done:
                return "done"
            if job is None:
                time.sleep(WAIT_S)
            else:
                self._do(job)
        return "stopped"

    def _claim(self) -> Job | None:
        """Under the lock: the next trial of the arm that has begun fewest, else a fresh seed."""
        arms = {arm.name: self._begun(arm.name) for arm in self._settings.arms}
        arm = min(self._settings.arms, key=lambda each: arms[each.name])
        if arms[arm.name] < self._budget.trials:
            return self._claim_trial(arm, arms[arm.name] + 1)
        if self._others_train(*arms):
            return None  # the best is not known yet
        return self._claim_repeat()

    def _claim_trial(self, arm: Arm, count: int) -> Job:
        trial = self._store.claim(arm.name, self._budget.trials)
        drawn = draw(arm.space, trial, arm.config)
        self._store.note(trial, drawn, self._settings.seed)
        title = f"{arm.name} {trial.number}, {count} of {self._budget.trials}"
        return self._job(arm.name, trial, arm, drawn, self._settings.seed, title)

    def _claim_repeat(self) -> Job | None:
        missing = missing_repeats(self._settings, self._store, self._budget.repeats)
        if not missing:
            return None
        subject, arm, settings, seed = missing[0]
        trial = self._store.claim_repeat(subject, settings, seed)
        title = f"{subject} with fresh seed {seed}"
        return self._job(REPEATS, trial, arm, settings, seed, title)

    def _job(
        self,
        study: str,
        trial: "Trial",
        arm: Arm,
        drawn: dict[str, Value],
        seed: int,
        title: str,
    ) -> Job:
        config, problem = None, ""
        try:
            config = self._settings.trial_config(arm, drawn, seed)
        except ConfigError as error:
            problem = str(error)
        return Job(
            arm=study,
            trial=trial,
            directory=self._store.directory_of(study, trial.number),
            config=config,
            problem=problem,
            title=title,
        )

    def _do(self, job: Job) -> None:
        self._progress.begins(job.title)
        judged = self._train(job) if job.config else self._refused(job)
        was_ours = self._store.end(
            job.arm,
            job.trial,
            judged.ended,
            value=judged.value,
            samples=judged.samples,
            seconds=judged.seconds,
            curve=judged.curve,
        )
        how = judged.why if was_ours else "was taken for lost and is repeated elsewhere"
        self._progress.ended(how, self._best_in_words(), self._remaining())
        self._failures = self._failures + 1 if judged.ended == "failed" else 0
        if self._failures >= MOST_FAILURES:
            problem = f"{self._failures} trainings in a row failed, the last with: {judged.why}"
            raise ConfigError("tune", problem, f"see {job.directory / 'train.log'}")

    def _refused(self, job: Job) -> Judged:
        return Judged(ended="refused", value=None, why=f"refused: {job.problem}")

    def _train(self, job: Job) -> Judged:
        assert job.config is not None
        path = job.directory / "trial.toml"
        write_file(path, config_to_toml(job.config).encode())
        pruned: list[Curve] = []
        others = [] if job.arm == REPEATS else self._curves(job.arm)

        def is_hopeless(curve: Curve) -> bool:
            self._progress.evaluated(curve, self._settings.config.eval.target_accuracy)
            own = [each.accuracy for each in curve]
            if job.arm != REPEATS and self._settings.pruner.is_hopeless(own, others):
                pruned.append(curve)
            return bool(pruned)

        trainer = self._settings.trainer or DEFAULT_TRAINER
        process = TrialProcess(trainer, job.directory, self._settings.data, path)
        try:
            status = process.wait(is_hopeless, lambda: self._stop.came)
        except DataError as error:
            return Judged(ended="failed", value=None, why=f"failed: {error}")
        return self._judge(job, status, pruned[0] if pruned else None)

    def _judge(self, job: Job, status: int, pruned: Curve | None) -> Judged:
        has_ended_itself = status in (0, TARGET_MISSED)  # whatever was asked of it meanwhile
        if pruned is not None and not has_ended_itself:
            last = pruned[-1]
            why = f"stopped as hopeless at {last.samples:,} samples, {last.accuracy:.4f}"
            return Judged(ended="pruned", value=None, samples=last.samples, curve=pruned, why=why)
        if has_ended_itself:
            return self._measured(job)
        if self._stop.came or status == STOPPED:
            return Judged(ended="interrupted", value=None, why="interrupted")
        why = f"training ended with status {status}: {last_line(job.directory)}"
        if status == MISTAKE:  # the same for every trial: a config of contradictions was refused
            self._store.end(
                job.arm, job.trial, "interrupted", value=None, samples=None, seconds=None, curve=()
            )
            raise ConfigError("tune", why, f"mend that; see {job.directory / 'train.log'}")
        return Judged(ended="failed", value=None, why=why)

    def _measured(self, job: Job) -> Judged:
        settings = self._settings
        target = settings.config.eval.target_accuracy
        try:
            measured = read_measured(job.directory / "run_0")
        except UserError as error:
            return Judged(ended="failed", value=None, why=f"failed: {error}")
        reached = samples_to(target, measured.curve)
        value = value_of(measured, settings.objective, target, settings.most_samples)
        best = measured.best_accuracy
        if reached is not None:
            why = f"reached {target:g} after {reached:,} samples, {measured.seconds:.1f} s"
        else:
            why = f"missed {target:g}, {best:.4f} at best after {measured.samples:,} samples"
        return Judged(
            ended="missed" if reached is None else "reached",
            value=value,
            samples=measured.samples if reached is None else reached,
            seconds=measured.seconds,
            curve=measured.curve,
            why=why,
        )

    def _curves(self, arm: str) -> list[tuple[float, ...]]:
        return [each.accuracies for each in self._store.trials(arm) if each.accuracies]

    def _begun(self, arm: str) -> int:
        return sum(each.status in ("running", "ended") for each in self._store.trials(arm))

    def _others_train(self, *arms: str) -> bool:
        names = arms or (*(arm.name for arm in self._settings.arms), REPEATS)
        return any(each.status == "running" for name in names for each in self._store.trials(name))

    def _remaining(self) -> int:
        """Trainings to come; while trials are among them, every arm is taken to find a best."""
        arms, budget = self._settings.arms, self._budget
        ended = [sum(map(_has_ended, self._store.trials(arm.name))) for arm in arms]
        trials = sum(max(0, budget.trials - each) for each in ended)
        if trials:
            return trials + (len(arms) + 1) * budget.repeats
        running = sum(each.status == "running" for each in self._store.trials(REPEATS))
        return running + len(missing_repeats(self._settings, self._store, budget.repeats))

    def _best_in_words(self) -> str:
        found = [best_trial(self._store.trials(arm.name)) for arm in self._settings.arms]
        reached = [each for each in found if each is not None and each.value is not None]
        if not reached:
            return "none has reached the target so far"
        best = min(reached, key=lambda each: each.value or 0.0)
        return f"best so far {in_words(best, self._settings.objective)} ({best.arm} {best.number})"


def _has_ended(trial: TrialRecord) -> bool:
    return trial.status == "ended"
