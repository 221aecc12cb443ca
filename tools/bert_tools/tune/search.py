"""The work of one process on a study: claim a trial, train, judge, record; then fresh seeds.

Several processes do the same side by side, without a master.
"""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bert_tools.tune.objective import Curve, Result, read_result
from bert_tools.tune.settings import Arm, StudySettings
from bert_tools.tune.space import Value, draw
from bert_tools.tune.store import REPEATS, Store
from bert_tools.tune.summary import best_trial, in_words, missing_repeats
from bert_tools.tune.trial_process import DEFAULT_TRAINER, StopSignal, TrialProcess, last_line
from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.console import LiveLine
from mlperf_bert.common.errors import (
    MISTAKE,
    STOPPED,
    TARGET_MISSED,
    ConfigError,
    DataError,
    UserError,
    one_line,
)
from mlperf_bert.config.files import config_to_toml
from mlperf_bert.config.run_config import RunConfig

if TYPE_CHECKING:
    from optuna import Trial

WAIT_S = 1.0
_REMEMBERED = 30  # trainings whose mean time predicts the rest
MOST_FAILURES = 3  # failed trainings in a row


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training claimed by this process; `config` is None for contradicting values."""

    arm: str
    trial: "Trial"
    directory: Path
    config: RunConfig | None
    problem: str
    title: str


class StudyProgress(LiveLine):
    """Prints the trial and their number, the best so far, and the estimated rest of the time."""

    def __init__(self, workers: int) -> None:
        super().__init__(moves=workers == 1)  # several would overwrite each other
        self._workers = workers
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._began_s = 0.0
        self._doing = ""

    def line(self, text: str) -> None:
        """Print a line that later output does not overwrite."""
        super().line(one_line(text))

    def begins(self, doing: str) -> None:
        """Note that a training begins."""
        self._began_s = time.monotonic()
        self._doing = doing
        self._tell(doing)

    def evaluated(self, curve: Curve, target: float) -> None:
        """Note an evaluation."""
        samples, accuracy = curve[-1]
        self._tell(f"{self._doing}: accuracy {accuracy:.4f} of {target:g} at {samples:,} samples")

    def ended(self, how: str, best: str, remaining: int) -> None:
        """Note its end; `remaining` others are to come."""
        self._seconds.append(time.monotonic() - self._began_s)
        left_s = remaining * sum(self._seconds) / len(self._seconds) / self._workers
        left = f"about {_in_minutes(left_s)} left" if remaining else "the last one"
        self.line(f"{self._doing}: {how}; {best}; {left}")

    def _tell(self, text: str) -> None:
        if self.is_live:  # without a terminal only lasting lines are printed
            self.update(text)


def _in_minutes(seconds: float) -> str:
    """The time as `1:02:03 h` or `2:03 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


class Search:
    """Works on a study until it is complete or a signal comes."""

    def __init__(
        self,
        settings: StudySettings,
        store: Store,
        progress: StudyProgress,
        stop: StopSignal,
        *,
        trials: int,
        repeats: int,
    ) -> None:
        """`trials` are those of each arm, `repeats` the later fresh seeds of each contender."""
        self._settings = settings
        self._store = store
        self._trials, self._repeats = trials, repeats
        self._progress = progress
        self._stop = stop
        self._arms = settings.arms
        self._failures = 0

    def work(self) -> Literal["done", "stopped"]:
        """Train until nothing is left to do. Raises UserError if training cannot work at all."""
        while not self._stop.came:
            with self._store.locked():
                for name in self._store.give_up_lost():
                    self._progress.line(f"{name}: was interrupted, and is repeated")
                job = self._claim()
                is_done = job is None and not self._store.count(None, "running")
            if is_done:
                return "done"
            if job is None:
                time.sleep(WAIT_S)
            else:
                self._do(job)
        return "stopped"

    def _claim(self) -> Job | None:
        """Claim, under the lock, the next trial of the least advanced arm, else a fresh seed."""
        begun = {arm.name: self._store.count(arm.name, "running", "ended") for arm in self._arms}
        arm = min(self._arms, key=lambda each: begun[each.name])
        if begun[arm.name] < self._trials:
            trial = self._store.claim(arm.name, self._trials)
            drawn = draw(arm.space, trial, arm.config)
            self._store.note(trial, drawn, self._settings.seed)
            title = f"{arm.name} {trial.number}, {begun[arm.name] + 1} of {self._trials}"
            return self._job(arm.name, trial, arm, drawn, self._settings.seed, title)
        if self._store.count(None, "running") > self._store.count(REPEATS, "running"):
            return None  # the best is not known yet
        missing = missing_repeats(self._settings, self._store, self._repeats)
        if not missing:
            return None
        subject, arm, settings, seed = missing[0]
        trial = self._store.claim_repeat(subject, settings, seed)
        title = f"{subject} with fresh seed {seed}"
        return self._job(REPEATS, trial, arm, settings, seed, title)

    def _job(
        self, study: str, trial: "Trial", arm: Arm, drawn: dict[str, Value], seed: int, title: str
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
        result = self._train(job)
        was_ours = self._store.end(job.arm, job.trial, result)
        how = result.why if was_ours else "counted as lost and is repeated elsewhere"
        self._progress.ended(how, self._best_in_words(), self._remaining())
        self._failures = self._failures + 1 if result.ended == "failed" else 0
        if self._failures >= MOST_FAILURES:
            problem = f"{self._failures} trainings in a row failed, the last with: {result.why}"
            raise ConfigError("tune", problem, f"see {job.directory / 'train.log'}")

    def _train(self, job: Job) -> Result:
        if job.config is None:
            return Result(ended="refused", why=f"refused: {job.problem}")
        path = job.directory / "trial.toml"
        write_file(path, config_to_toml(job.config).encode())
        pruned: list[Curve] = []
        trials = [] if job.arm == REPEATS else self._store.trials(job.arm)
        others = [each.accuracies for each in trials if each.accuracies]

        def is_hopeless(curve: Curve) -> bool:
            self._progress.evaluated(curve, self._settings.target)
            own = [accuracy for _, accuracy in curve]
            if job.arm != REPEATS and self._settings.pruner.is_hopeless(own, others):
                pruned.append(curve)
            return bool(pruned)

        trainer = self._settings.trainer or DEFAULT_TRAINER
        process = TrialProcess(trainer, job.directory, self._settings.data, path)
        try:
            status = process.wait(is_hopeless, lambda: self._stop.came)
        except DataError as error:
            return Result(ended="failed", why=f"failed: {error}")
        return self._judge(job, status, pruned[0] if pruned else None)

    def _judge(self, job: Job, status: int, pruned: Curve | None) -> Result:
        has_ended_itself = status in (0, TARGET_MISSED)  # even if it was asked to stop meanwhile
        if pruned is not None and not has_ended_itself:
            samples, accuracy = pruned[-1]
            why = f"stopped as hopeless at {samples:,} samples, {accuracy:.4f}"
            return Result(ended="pruned", samples=samples, curve=pruned, why=why)
        if has_ended_itself:
            settings = self._settings
            target, most = settings.target, settings.most_samples
            try:
                return read_result(job.directory / "run_0", settings.objective, target, most)
            except UserError as error:
                return Result(ended="failed", why=f"failed: {error}")
        if self._stop.came or status == STOPPED:
            return Result(ended="interrupted", why="interrupted")
        why = f"training ended with status {status}: {last_line(job.directory)}"
        if status == MISTAKE:  # the same for every trial, as contradicting configs were refused
            self._store.end(job.arm, job.trial, Result(ended="interrupted"))
            raise ConfigError("tune", why, f"mend that; see {job.directory / 'train.log'}")
        return Result(ended="failed", why=why)

    def _remaining(self) -> int:
        """Number of trainings to come; while trials remain, every arm is assumed to find a best."""
        ended = [self._store.count(arm.name, "ended") for arm in self._arms]
        trials = sum(max(0, self._trials - each) for each in ended)
        if trials:
            return trials + (len(self._arms) + 1) * self._repeats
        missing = missing_repeats(self._settings, self._store, self._repeats)
        return self._store.count(REPEATS, "running") + len(missing)

    def _best_in_words(self) -> str:
        found = [best_trial(self._store.trials(arm.name)) for arm in self._arms]
        best = min((each for each in found if each), key=lambda each: each.value or 0, default=None)
        if best is None:
            return "none has reached the target so far"
        return f"best so far {in_words(best, self._settings.objective)} ({best.arm} {best.number})"
