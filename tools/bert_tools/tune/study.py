"""A search as an Optuna study: each trial is a run directory of `train`, one after another.

The study directory has Optuna's journal, `journal.log`, and the run directories in `trials/`. A
trial that was running when the search ended is enqueued again with the same values when it is
continued. Afterwards the config itself and the best trial's run on fresh seeds.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Any, Literal

from bert_tools.tune.objective import Curve, Objective, Result, judged, read_curve
from bert_tools.tune.space import Space, Value, draw, space_as_json
from mlperf_bert.config.files import (
    checked_setting,
    config_from_tables,
    config_to_tables,
    config_to_toml,
)
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.signal_watch import end_with_parent
from mlperf_bert.errors import (
    MISTAKE,
    TARGET_MISSED,
    ConfigError,
    DataError,
    UserError,
    one_line,
    say,
)
from mlperf_bert.files import file_sha256, not_through_a_link, write_file
from mlperf_bert.run.outcome import read_outcome

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial

PruningRule = Literal["median", "halving", "none"]
How = Literal["reached", "missed", "pruned", "refused", "failed"]

JOURNAL = "journal.log"
LOG = "train.log"
DEFAULT = "default"  # the given config, on fresh seeds
DEFAULT_TRAINER = (sys.executable, "-P", "-m", "mlperf_bert", "train")
MOST_FAILURES = 3  # failed trainings in a row
POLL_S = 0.25
END_S = 120.0  # seconds for a training to end after SIGTERM, as its ranks may take 110 s
_LEAST_CURVES = 4  # trainings of others, before the median stops anything
_PRUNE_FROM = 4  # nothing is stopped before a quarter of the budget's evaluations, rounded down
_LEAST_RANDOM, _MOST_RANDOM = 4, 10  # trials drawn at random before TPE has enough data
_RESULT, _SETTINGS, _STUDY = "result", "settings", "study"  # keys of facts in the journal
_REMEDY = "give a new --out directory, or the options that it was begun with"


@dataclass(frozen=True, kw_only=True, slots=True)
class StudySettings:
    """A study. `most_samples` is per training; `seed` is for all trials' training and draws."""

    config: RunConfig
    config_path: Path
    space: Space
    data: Path
    objective: Objective
    most_samples: int
    seed: int
    prune: PruningRule
    trainer: tuple[str, ...] | None

    @property
    def target(self) -> float:
        """The accuracy that trainings should reach; a search without one was refused before."""
        assert self.config.eval.target is not None
        return self.config.eval.target

    @property
    def evaluations(self) -> int:
        """Evaluations of a training that uses its whole budget."""
        return self.most_samples // self.config.eval_interval_samples

    def trial_config(self, drawn: Mapping[str, Value], seed: int) -> RunConfig:
        """The config of one training. Raises ConfigError if its values contradict."""
        tables = with_values(self.config, drawn)
        trial = config_from_tables(tables, "trial")
        tables["run"]["seed"] = seed
        tables["run"]["max_steps"] = max(1, self.most_samples // trial.parallel.global_batch_size)
        tables["checkpoint"]["save"] = "never"
        return config_from_tables(tables, "trial")

    def as_json(self) -> dict[str, Any]:
        """What must not change when the study is continued. Raises DataError without data."""
        return {
            "config": config_to_tables(self.config),
            "data_sha256": [_manifest_digest(self.data / part) for part in ("train", "eval")],
            "space": space_as_json(self.space),
            "objective": self.objective,
            "most_samples": self.most_samples,
            "seed": self.seed,
            "prune": self.prune,
        }


def with_values(config: RunConfig, values: Mapping[str, Value]) -> dict[str, dict[str, Any]]:
    """The config's tables with some settings changed. Raises ConfigError for wrong values."""
    tables = config_to_tables(config)
    for dotted, value in values.items():
        section, _, field = dotted.partition(".")
        tables[section][field] = checked_setting(dotted, value, "trial")
    return tables


def open_journal(path: Path) -> "JournalStorage":
    """Optuna's storage in that file, made if missing.

    An unfinished last line of a writer that was killed or found a full disk is cut off, as the next
    line would be appended to it. Raises DataError for a link.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    if path.is_symlink():
        raise DataError(str(path), "is a link, and its target would be written to", _REMEDY)
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    lock = JournalFileOpenLock(str(path))
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def open_study(directory: Path, settings: StudySettings) -> "Study":
    """Begin or continue the study of a directory; interrupted trials are enqueued again.

    Raises DataError if it was begun with other settings, or has a damaged journal.
    """
    from optuna import create_study
    from optuna.trial import TrialState

    now = settings.as_json()
    path = directory / JOURNAL
    try:
        study = create_study(
            storage=open_journal(path),
            study_name="tune",
            direction="minimize",
            pruner=_pruner(settings),
            load_if_exists=True,
        )
    except (OSError, UserError):
        raise
    except Exception as error:  # Optuna trusts its journal: a wrong file may raise anything
        raise DataError(str(path), f"is no journal of Optuna ({error!r})", _REMEDY) from None
    before = study.user_attrs.get(_STUDY, now)
    differing = [key for key in now if before.get(key) != now[key]]
    if differing:
        raise DataError(str(path), f"was begun with other {', '.join(differing)}", _REMEDY)
    study.set_user_attr(_STUDY, now)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        say(f"trial {trial.number}: was interrupted, and is repeated")
        study.enqueue_trial(trial.params)
        study.tell(trial.number, state=TrialState.FAIL)
    return study


def search(study: "Study", settings: StudySettings, directory: Path, trials: int) -> None:
    """Run trials until so many have ended.

    Draws depend on the seed and the number of ended trials, so that an interrupted study continues
    as it would have. Raises ConfigError if training cannot work at all.
    """
    from optuna.samplers import TPESampler

    failures = 0
    while (count := len(ended_trials(study))) < trials:
        study.sampler = TPESampler(
            seed=settings.seed * 1_000_003 + count,
            n_startup_trials=min(_MOST_RANDOM, max(_LEAST_RANDOM, trials // 3)),
        )
        ending = _run_trial(study, settings, directory)
        best = best_trial(study)
        so_far = "none has reached the target so far"
        if best is not None:
            so_far = f"best so far {in_words(best, settings.objective)} (trial {best.number})"
        say(one_line(f"trial {count + 1} of {trials}: {ending.why}; {so_far}"))
        failures = failures + 1 if ending.how == "failed" else 0
        if failures >= MOST_FAILURES:
            problem = f"{failures} trainings in a row failed, the last with: {ending.why}"
            raise ConfigError("tune", problem, f"see {directory / 'trials'}")


def run_fresh_seeds(
    study: "Study", settings: StudySettings, directory: Path, repeats: int
) -> dict[str, list[Result]]:
    """Results of the given config and of the best trial's on fresh seeds, by subject.

    A run that has ended is not run again. Raises ConfigError if a training fails.
    """
    subjects: dict[str, Mapping[str, Value]] = {DEFAULT: {}}
    best = best_trial(study)
    if best is not None:
        subjects[f"best_{best.number:05d}"] = best.user_attrs[_SETTINGS]
    found: dict[str, list[Result]] = {subject: [] for subject in subjects}
    for seed in range(settings.seed + 1, settings.seed + 1 + repeats):
        for subject, values in subjects.items():
            folder = directory / "trials" / f"{subject}_seed_{seed}"
            if not _has_ended(folder):
                shutil.rmtree(folder, ignore_errors=True)  # of an interrupted run
                config = settings.trial_config(values, seed)
                status = _train(settings, config, folder, lambda _: False)
                _check_status(status, folder)
                say(f"{subject} with fresh seed {seed}: {_result_of(folder, settings).why}")
            found[subject].append(_result_of(folder, settings))
    return found


def ended_trials(study: "Study") -> "list[FrozenTrial]":
    """The trials that count, by number: all but interrupted ones."""
    return [each for each in study.get_trials(deepcopy=False) if _RESULT in each.user_attrs]


def ending_of(trial: "FrozenTrial") -> "Ending":
    """How an ended trial ended."""
    return Ending(**trial.user_attrs[_RESULT])


def best_trial(study: "Study") -> "FrozenTrial | None":
    """The trial that reached the target with the least value; the first of equal ones."""
    reached = [each for each in ended_trials(study) if ending_of(each).how == "reached"]
    return min(reached, key=lambda each: (each.value or 0.0, each.number), default=None)


def in_words(trial: "FrozenTrial", objective: Objective) -> str:
    """Samples or seconds, in words, of a trial that reached the target."""
    ending = ending_of(trial)
    return f"{ending.seconds:,.1f} s" if objective == "time" else f"{ending.samples:,} samples"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a trial ended; samples and seconds are 0 where nothing was trained or measured."""

    how: How
    why: str
    samples: int = 0
    seconds: float = 0.0


def _run_trial(study: "Study", settings: StudySettings, directory: Path) -> Ending:
    from optuna.trial import TrialState

    trial = study.ask()
    drawn = draw(settings.space, trial, settings.config)
    trial.set_user_attr(_SETTINGS, drawn)
    folder = directory / "trials" / f"trial_{trial.number:05d}"
    seen: list[tuple[int, float]] = []

    def is_hopeless(curve: Curve) -> bool:
        seen[:] = curve
        _, accuracy = curve[-1]
        trial.report(1 - accuracy, len(curve))
        return accuracy < settings.target and trial.should_prune()

    value, state = None, TrialState.FAIL
    try:
        config = settings.trial_config(drawn, settings.seed)
    except ConfigError as error:
        ending, state = Ending(how="refused", why=f"refused: {error}"), TrialState.PRUNED
    else:
        status = _train(settings, config, folder, is_hopeless)
        if status in (0, TARGET_MISSED):  # by itself, even if it was asked to end meanwhile
            ending, value = _judge(folder, settings)
            state = TrialState.COMPLETE if value is not None else TrialState.FAIL
        elif status is None:
            samples, accuracy = seen[-1]
            why = f"stopped as hopeless at {samples:,} samples, {accuracy:.4f}"
            ending, state = Ending(how="pruned", why=why, samples=samples), TrialState.PRUNED
        else:
            if status == MISTAKE:  # the same for every trial, as contradicting values were refused
                _check_status(status, folder)
            ending = Ending(how="failed", why=_failure(status, folder))
    if ending.how == "reached":  # it counts as at the target from then on, for the median
        for number in range(len(seen) + 1, settings.evaluations + 1):
            trial.report(1 - settings.target, number)
    trial.set_user_attr(_RESULT, asdict(ending))
    study.tell(trial, value, state=state)
    return ending


def _judge(folder: Path, settings: StudySettings) -> tuple[Ending, float | None]:
    """Ending and value of a run that ended by itself; no value if its files are damaged."""
    try:
        result = _result_of(folder, settings)
    except UserError as error:
        return Ending(how="failed", why=f"failed: {error}"), None
    how: How = "reached" if result.is_reached else "missed"
    ending = Ending(how=how, why=result.why, samples=result.samples, seconds=result.seconds)
    return ending, result.value


def _result_of(folder: Path, settings: StudySettings) -> Result:
    """The result of an ended run. Raises DataError if it did not end in order."""
    run = folder / "run_0"
    outcome = read_outcome(run / "outcome.json")
    objective, target = settings.objective, settings.target
    return judged(read_curve(run), outcome, objective, target, settings.most_samples)


def _has_ended(folder: Path) -> bool:
    """True if the run directory has a run that no signal ended."""
    path = folder / "run_0" / "outcome.json"
    return path.exists() and read_outcome(path).stopped_by is None


def _train(
    settings: StudySettings,
    config: RunConfig,
    folder: Path,
    is_hopeless: Callable[[Curve], bool],
) -> int | None:
    """Train in a run directory, with the output in `train.log` there; its exit status.

    `is_hopeless` takes the curve up to each evaluation; None if it ended the training. The training
    ends with this process (on Linux), and a terminal's Ctrl-C reaches only this process. Raises
    ConfigError if the trainer cannot be started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "trial.toml", config_to_toml(config).encode())
    command = [*(settings.trainer or DEFAULT_TRAINER), "--config", str(folder / "trial.toml")]
    command += ["--data", str(settings.data), "--run-dir", str(folder)]
    with open(folder / LOG, "ab", opener=not_through_a_link) as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
        except OSError as error:
            problem = f"{command[0]!r} cannot be started ({error.strerror})"
            raise ConfigError("--trainer", problem, "give a command that is there") from None
    seen, stops = 0, False
    try:
        while process.poll() is None and not stops:
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
            curve = read_curve(folder / "run_0")
            news = (curve[:number] for number in range(seen + 1, len(curve) + 1))
            stops = any(map(is_hopeless, news))
            seen = len(curve)
    finally:  # after an error or a signal too: no training may continue unseen
        _end(process)
    status = process.wait()
    if stops and status not in (0, TARGET_MISSED):
        return None
    return status if status >= 0 else 128 - status


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGTERM, on which a training ends in order; then SIGKILL to all its processes."""
    process.terminate()  # does nothing after the end
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, SIGKILL)


def _check_status(status: int | None, folder: Path) -> None:
    """Raise ConfigError unless a training ended by itself."""
    if status not in (0, TARGET_MISSED):
        raise ConfigError("tune", _failure(status, folder), f"mend that; see {folder / LOG}")


def _failure(status: int | None, folder: Path) -> str:
    """The status of a failed training, and the last line that it printed."""
    text = (folder / LOG).read_bytes()[-4096:].decode("utf-8", "replace").strip()
    said = text.splitlines()[-1] if text else "nothing was printed"
    return f"training ended with status {status}: {said}"


def _pruner(settings: StudySettings) -> "BasePruner":
    from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner

    first = max(2, settings.evaluations // _PRUNE_FROM)
    if settings.prune == "median":
        return MedianPruner(_LEAST_CURVES, first, n_min_trials=_LEAST_CURVES)
    if settings.prune == "halving":
        return SuccessiveHalvingPruner(min_resource=first, reduction_factor=3)
    return NopPruner()


def _manifest_digest(folder: Path) -> str:
    path = folder / "index" / "dataset.json"
    try:
        return file_sha256(path)
    except OSError as error:
        problem = error.strerror or "cannot be read"
        raise DataError(str(path), problem, "prepare the data first: mlperf_bert prepare") from None
