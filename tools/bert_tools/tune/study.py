"""Searches hyper-parameters with an Optuna study, which runs its trials one after another.

Each trial is a training run by `train`. The study directory contains Optuna's journal,
`journal.log`, and the run directories in `trials/`. If the search is interrupted during a trial,
the continued search repeats this trial with the same values. A training that missed its target has
no objective value, so Optuna ranks it by its accuracies, like a pruned trial.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Any, Literal, get_args

from bert_tools.report.run import read_metrics
from bert_tools.tune.space import Space, Value, draw, space_as_json
from mlperf_bert.config.files import (
    checked_setting,
    config_from_tables,
    config_to_tables,
    config_to_toml,
)
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.index import sets_sha256
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
from mlperf_bert.files import not_through_a_link, write_file, write_json
from mlperf_bert.run.outcome import read_outcome

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial, Trial

Objective = Literal["samples", "time"]
How = Literal["reached", "missed", "pruned", "refused", "failed"]
ENDINGS: tuple[How, ...] = get_args(How)

RESULT_SCHEMA_VERSION = 4
JOURNAL = "journal.log"
BEST = "best.toml"
LOG = "train.log"
DEFAULT_TRAINER = (sys.executable, "-P", "-m", "mlperf_bert", "train")
MOST_FAILURES = 3  # failed trainings in a row that end the search
POLL_S = 0.25
END_S = 120.0  # wait this long after SIGTERM, because ranks may need 110 s to exit
_LEAST_CURVES = 4  # trainings needed before the median of their curves prunes others
_PRUNE_FROM = 4  # prune after one quarter of the budget's evaluations, rounded down
_LEAST_RANDOM, _MOST_RANDOM = 4, 10  # trials at random, until TPE has enough data
_SCHEDULE_STEPS = ("decay_steps", "warmup_steps", "start_warmup_step", "cooldown_steps")
_ENDING, _SETTINGS, _STUDY = "result", "settings", "study"  # attribute keys in the journal
_REMEDY = "use a new --out directory, or the options that the study was started with"


@dataclass(frozen=True, kw_only=True, slots=True)
class StudySettings:
    """The settings of a study.

    `most_samples` is the maximum number of samples per training. `seed` is the seed of every
    training and of the search.
    """

    config: RunConfig
    config_path: Path
    space: Space
    data: Path
    objective: Objective
    most_samples: int
    seed: int
    trainer: tuple[str, ...] | None

    @property
    def target(self) -> float:
        """Return the target accuracy. The command line rejects a config without a target."""
        assert self.config.eval.target is not None
        return self.config.eval.target

    @property
    def evaluations(self) -> int:
        """Return the number of evaluations in a training that uses all `most_samples` samples."""
        return self.most_samples // self.config.eval_interval_samples

    def trial_config(self, drawn: Mapping[str, Value]) -> RunConfig:
        """Return the config of one trial's training.

        Raises ConfigError if the drawn values cannot be combined.
        """
        tables = with_values(self.config, drawn)
        trial = config_from_tables(tables, "trial")
        tables["run"]["seed"] = self.seed
        tables["run"]["max_steps"] = max(1, self.most_samples // trial.parallel.global_batch_size)
        tables["checkpoint"]["interval_steps"] = "never"
        if trial.mlperf.division == "open":  # "mlperf" depends on the batch
            tables["eval"]["interval_samples"] = self.config.eval_interval_samples
        return config_from_tables(tables, "trial")

    def as_json(self) -> dict[str, Any]:
        """Return the settings and digests that must not change when the study is continued.

        Raises DataError if the prepared data is missing.
        """
        return {
            "config": config_to_tables(self.config),
            "data_sha256": sets_sha256(self.data / "train", self.data / "eval"),
            "space": space_as_json(self.space),
            "objective": self.objective,
            "most_samples": self.most_samples,
            "seed": self.seed,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The result of a trial.

    `samples` is the number of samples to target, or of all trained samples if the target was not
    reached. `seconds` is the training time, or 0 if nothing was trained or measured.
    """

    how: How
    why: str
    samples: int = 0
    seconds: float = 0.0

    def value(self, objective: Objective) -> float:
        """Return the number that the study minimizes: samples or seconds."""
        return self.seconds if objective == "time" else self.samples


def with_values(config: RunConfig, values: Mapping[str, Value]) -> dict[str, dict[str, Any]]:
    """Return the config's tables after some of its settings were changed. Raises ConfigError.

    If they change the global batch, the schedule keeps its length in samples. Otherwise batches
    would be compared under different schedules.
    """
    tables = config_to_tables(config)
    for dotted, value in values.items():
        section, _, field = dotted.partition(".")
        tables[section][field] = checked_setting(dotted, value, "trial")
    batch = config_from_tables(tables, "trial").parallel.global_batch_size
    for field in _SCHEDULE_STEPS:
        if f"schedule.{field}" not in values:
            steps = tables["schedule"][field] * config.parallel.global_batch_size
            tables["schedule"][field] = round(steps / batch)
    return tables


def open_journal(path: Path) -> "JournalStorage":
    """Open a file as Optuna's storage, or create it if it does not exist.

    If a writer was killed or the disk was full, the last line is incomplete. This line is removed,
    because otherwise the next record would be appended to it. Raises DataError if the path is a
    link.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    if path.is_symlink():
        raise DataError(str(path), "is a symbolic link, but must be a file", _REMEDY)
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    lock = JournalFileOpenLock(str(path))
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def open_study(directory: Path, settings: StudySettings) -> "Study":
    """Start or continue the study in a directory, and enqueue interrupted trials again.

    If a search stopped after it had stored a trial's result, the study is told this result.

    Raises DataError if the study was started with other settings, or if its journal is damaged.
    """
    from optuna import create_study
    from optuna.pruners import MedianPruner, NopPruner
    from optuna.trial import TrialState

    now = settings.as_json()
    path = directory / JOURNAL
    first = max(2, settings.evaluations // _PRUNE_FROM)
    median = MedianPruner(_LEAST_CURVES, first, n_min_trials=_LEAST_CURVES)
    try:
        study = create_study(
            storage=open_journal(path),
            study_name="tune",
            direction="minimize",
            # Curves are compared at equal samples, which take unequal times.
            pruner=NopPruner() if settings.objective == "time" else median,
            load_if_exists=True,
        )
    except (OSError, UserError):
        raise
    except Exception as error:  # Optuna does not check its journal, so any error may come from it
        raise DataError(str(path), f"is not a journal of Optuna ({error!r})", _REMEDY) from None
    before = study.user_attrs.get(_STUDY, now)
    differing = [key for key in now if before.get(key) != now[key]]
    if differing:
        raise DataError(
            str(path), f"was started with other values of {', '.join(differing)}", _REMEDY
        )
    study.set_user_attr(_STUDY, now)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if _ENDING in trial.user_attrs:
            _tell(study, trial.number, ending_of(trial), settings.objective)
            continue
        say(f"trial {trial.number} was interrupted and will be repeated")
        study.enqueue_trial(trial.params)
        study.tell(trial.number, state=TrialState.FAIL)
    return study


def search(study: "Study", settings: StudySettings, directory: Path, trials: int) -> None:
    """Run trials until `trials` of them have ended, including those of earlier searches.

    The drawn values depend only on the seed and the trials that have ended, so an interrupted study
    continues as it would have without the interruption. Raises ConfigError if the trainer does not
    start, if it rejects the options of the first trial or of several trials in a row, or if several
    trainings in a row fail.
    """
    from optuna.samplers import TPESampler

    failures = 0
    while (count := len(ended_trials(study))) < trials:
        study.sampler = TPESampler(
            seed=settings.seed * 1_000_003 + count,
            n_startup_trials=min(_MOST_RANDOM, max(_LEAST_RANDOM, trials // 3)),
        )
        trial = study.ask()
        ending = _run_trial(study, trial, settings, directory / "trials")
        best = best_trial(study, settings.objective)
        so_far = "no trial has reached the target so far"
        if best is not None:
            so_far = f"best so far {in_words(best, settings.objective)} (trial {best.number})"
        say(one_line(f"trial {count + 1} of {trials}: {ending.why}; {so_far}"))
        failures = failures + 1 if ending.how == "failed" else 0
        if failures >= MOST_FAILURES:
            problem = f"{failures} trainings in a row failed (the last one: {ending.why})"
            remedy = f"read {LOG} of the last trials in {directory / 'trials'}"
            raise ConfigError("tune", problem, remedy)


def ended_trials(study: "Study") -> "list[FrozenTrial]":
    """Return the trials that have ended, in order. Interrupted trials are not included."""
    return [each for each in study.get_trials(deepcopy=False) if _ENDING in each.user_attrs]


def ending_of(trial: "FrozenTrial") -> Ending:
    """Return the recorded result of a trial that has ended."""
    return Ending(**trial.user_attrs[_ENDING])


def best_trial(study: "Study", objective: Objective) -> "FrozenTrial | None":
    """Return the trial that reached the target with the lowest objective value, or None.

    If several trials have the lowest value, the first of them is returned.
    """
    reached = [each for each in ended_trials(study) if ending_of(each).how == "reached"]
    return min(reached, key=lambda each: ending_of(each).value(objective), default=None)


def in_words(trial: "FrozenTrial", objective: Objective) -> str:
    """Format the objective value (samples or seconds) of a trial that reached the target."""
    ending = ending_of(trial)
    return f"{ending.seconds:,.1f} s" if objective == "time" else f"{ending.samples:,} samples"


def write_results(directory: Path, study: "Study", settings: StudySettings) -> dict[str, Any]:
    """Write result.json, and best.toml if a trial reached the target.

    Returns the contents of result.json. Raises DataError if a file cannot be written.
    """
    ended, best = ended_trials(study), best_trial(study, settings.objective)
    counts = Counter(ending_of(each).how for each in ended)
    result: dict[str, Any] = {
        "schema_version": RESULT_SCHEMA_VERSION,
        "objective": settings.objective,
        "target_accuracy": settings.target,
        "most_samples": settings.most_samples,
        "trial_seed": settings.seed,
        "trials": {ending: counts[ending] for ending in ENDINGS},
        "samples_trained": sum(ending_of(each).samples for each in ended),
        "best": None,
    }
    if best is not None:
        ending, drawn = ending_of(best), best.user_attrs[_SETTINGS]
        result["best"] = {
            "trial": best.number,
            "settings": drawn,
            "samples": ending.samples,
            "seconds": ending.seconds,
        }
        # Seed and checkpoints are those of the given config, not those of the trials.
        tables = with_values(settings.config, drawn)
        tuned = config_from_tables(tables, "best")
        steps = -(-settings.most_samples // tuned.parallel.global_batch_size)
        if tuned.max_steps < steps:  # Otherwise the run could end before the trial's last step.
            tables["run"]["max_steps"] = steps
            tuned = config_from_tables(tables, "best")
        lines = (
            f"Found by mlperf_bert tune in trial {best.number}: "
            f"{in_words(best, settings.objective)} to accuracy {settings.target:g} with seed "
            f"{settings.seed}.",
            f"Started from {settings.config_path.name}. Searched {', '.join(drawn)}.",
        )
        comments = "".join(f"# {one_line(line)}\n" for line in lines)
        write_file(directory / BEST, f"{comments}\n{config_to_toml(tuned)}".encode())
    write_file(directory / "result.json", write_json(result))
    return result


def result_in_words(facts: dict[str, Any]) -> str:
    """Format the contents of result.json as two lines.

    The first line counts the trials, and the second line describes the best trial, if any.
    """
    counts = ", ".join(f"{count} {ending}" for ending, count in facts["trials"].items())
    line = f"trials: {counts}; {facts['samples_trained']:,} samples trained"
    best = facts["best"]
    if best is None:
        return f"{line}\nno trial reached the target; widen the space or raise --samples"
    values = ", ".join(f"{key} = {value}" for key, value in best["settings"].items())
    needed = f"{best['samples']:,} samples, {best['seconds']:,.1f} s"
    return f"{line}\nbest: trial {best['trial']}, {needed}: {values}"


def _run_trial(study: "Study", trial: "Trial", settings: StudySettings, trials: Path) -> Ending:
    """Draw values, train with them, and report the training's result to the study."""
    drawn = draw(settings.space, trial, settings.config)
    trial.set_user_attr(_SETTINGS, drawn)
    try:
        config = settings.trial_config(drawn)
    except ConfigError as error:
        ending = Ending(how="refused", why=f"refused: {error}")
    else:
        ending = _train(trial, config, settings, trials / f"trial_{trial.number:05d}")
    trial.set_user_attr(_ENDING, asdict(ending))
    _tell(study, trial.number, ending, settings.objective)
    return ending


def _tell(study: "Study", number: int, ending: Ending, objective: Objective) -> None:
    """Report the result of a trial to the study."""
    from optuna.trial import TrialState

    if ending.how == "reached":
        study.tell(number, ending.value(objective))
    else:
        is_failure = ending.how == "failed"
        study.tell(number, state=TrialState.FAIL if is_failure else TrialState.PRUNED)


def report_point(trial: "Trial", last: int, interval: int, samples: int, accuracy: float) -> int:
    """Report an evaluation to a trial, and return the number of its interval of samples.

    Intervals are those of the study's config, because larger batches have longer ones. Only the
    first evaluation after the interval `last` counts.
    """
    number = samples // interval
    if number > last:
        trial.report(1 - accuracy, number)
    return max(number, last)


def _train(trial: "Trial", config: RunConfig, settings: StudySettings, folder: Path) -> Ending:
    """Train in a run directory, and report each evaluation to the trial.

    Stops the training early if the study prunes the trial. Raises ConfigError if the trainer cannot
    be started, or if it rejects its options for another reason than the trial's values.
    """
    process = _start_training(config, settings, folder)
    run, seen, is_hopeless = folder / "run_0", 0, False
    last, interval = 0, settings.config.eval_interval_samples
    try:
        while process.poll() is None and not is_hopeless:
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
            curve = read_curve(run)
            while seen < len(curve) and not is_hopeless:
                samples, accuracy = curve[seen]
                seen += 1
                last = report_point(trial, last, interval, samples, accuracy)
                is_hopeless = accuracy < settings.target and trial.should_prune()
    finally:  # also after an error or a signal, so that no training continues unnoticed
        _end(process)
    status = process.wait()
    if status not in (0, TARGET_MISSED):
        if is_hopeless:
            samples, accuracy = curve[seen - 1]
            why = f"stopped after {samples:,} samples at {accuracy:.4f}, as it was unlikely to win"
            return Ending(how="pruned", why=why, samples=samples)
        return _failure(trial, status, folder / LOG)
    try:  # The training ended by itself, even if it was told to stop in the meantime.
        outcome, curve = read_outcome(run / "outcome.json"), read_curve(run)
    except UserError as error:
        return Ending(how="failed", why=f"failed: {error}")
    for point in curve[seen:]:
        last = report_point(trial, last, interval, *point)
    target, seconds = settings.target, outcome.seconds
    reached = next((samples for samples, accuracy in curve if accuracy >= target), None)
    if reached is None or outcome.status != "success":
        best = max((accuracy for _, accuracy in curve), default=0.0)
        why = f"missed {target:g} with at most {best:.4f} after {outcome.samples:,} samples"
        return Ending(how="missed", why=why, samples=outcome.samples, seconds=seconds)
    for number in range(last + 1, settings.evaluations + 1):
        trial.report(1 - target, number)  # The median counts it as staying at the target.
    why = f"reached {target:g} after {reached:,} samples and {seconds:.1f} s"
    return Ending(how="reached", why=why, samples=reached, seconds=seconds)


def _failure(trial: "Trial", status: int, log: Path) -> Ending:
    """Return the result of a training that exited with an error.

    If `train` rejected its options, this is due to the trial's values if one of the last trials was
    trained, or if an earlier trial had the same values. Otherwise raises ConfigError, because the
    command may be wrong.
    """
    text = log.read_bytes()[-4096:].decode("utf-8", "replace").strip()
    last_line = text.splitlines()[-1] if text else "nothing was printed"
    if status != MISTAKE:
        return Ending(how="failed", why=f"training exited with status {status}: {last_line}")
    problem = f"`train` stopped with an error: {one_line(last_line)}"
    given = [each.user_attrs.get(_SETTINGS) for each in trial.study.get_trials(deepcopy=False)]
    last = ended_trials(trial.study)[-MOST_FAILURES:]
    is_trained = any(ending_of(each).how != "refused" for each in last)
    if is_trained or given.count(trial.user_attrs[_SETTINGS]) > 1:
        return Ending(how="refused", why=f"refused: {problem}")
    remedy = f"fix the cause, and run the same command again to continue (see {log})"
    raise ConfigError("tune", problem, remedy)


def read_curve(run: Path) -> tuple[tuple[int, float], ...]:
    """Return (samples, accuracy) for each evaluation that a run has made so far.

    `run` is a directory `run_<i>`. Raises DataError for a file that cannot be read.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        return ()
    return tuple(
        (record["samples"], float(record["mlm_accuracy"]))
        for record in read_metrics(path)
        if record["mlm_accuracy"] is not None
    )


def _start_training(
    config: RunConfig, settings: StudySettings, folder: Path
) -> "subprocess.Popen[bytes]":
    """Start a training in another process, which writes its output to `train.log`.

    On Linux, the training ends when this process ends. Ctrl-C in a terminal reaches only this
    process, which then stops the training. Raises ConfigError if the command cannot be started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "trial.toml", config_to_toml(config).encode())
    command = [*(settings.trainer or DEFAULT_TRAINER), "--config", str(folder / "trial.toml")]
    command += ["--data", str(settings.data), "--run-dir", str(folder)]
    with open(folder / LOG, "ab", opener=not_through_a_link) as log:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
        except OSError as error:
            problem = f"{command[0]!r} cannot be started ({error.strerror})"
            raise ConfigError("--trainer", problem, "check the command and your PATH") from None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop a training.

    SIGTERM lets the training exit cleanly. Later, SIGKILL ends its remaining processes.
    """
    process.terminate()  # no effect if the process has ended
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, SIGKILL)
