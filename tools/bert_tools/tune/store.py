"""Trials of a study in Optuna's journal: claimed one at a time, ended once, repeated if lost.

The journal has Optuna's own format, one JSON object per line, checked before Optuna reads it. It
needs no database and no file locks of the kernel, so workers on several nodes can share one over
NFS. It holds no pickle: Optuna has pickles for Redis only.
"""

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from bert_tools.common.log_reader import is_number
from bert_tools.tune.objective import Ended, Result
from bert_tools.tune.space import Value
from bert_tools.tune.trial_process import beat, is_lost, owner
from mlperf_bert.common.atomic import whole_or_nothing
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.records import Record
from mlperf_bert.common.untrusted import in_brief, parse_json_object, read_regular_file

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
    from optuna.trial import FrozenTrial


MAX_JOURNAL_BYTES = 64 * 2**20  # 12,000 trainings with twenty evaluations each
_MAX_LINE_BYTES = 2**20  # accuracies of 10,000 evaluations take 220 kB
_OPERATIONS = range(11)
REMEDY = "use the journal as tune wrote it, or begin a new study"


def need_optuna() -> None:
    """Raise ConfigError if Optuna is not installed."""
    try:
        import optuna
    except ImportError:
        remedy = "run in the checkout: tools/venv.sh tune"
        raise ConfigError("tune", "Optuna is not installed", remedy) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def open_journal(path: Path) -> "JournalStorage":
    """Open the storage in that file, made if missing.

    An unfinished last line of a killed writer is cut off, as the next line would be appended to it.
    Raises DataError if the file is too large or is no journal.
    """
    from optuna.storages import JournalStorage

    if path.is_symlink():
        raise DataError(str(path), "is a link, and its target would be written to", REMEDY)
    if path.exists():
        with held(_lock(path)):  # so that no writer is in the middle of a line
            check_journal(path)
            _cut_unfinished_line(path)
    try:
        return JournalStorage(_backend(path))
    except Exception as error:  # Optuna trusts its journal: a wrong file may raise anything
        raise DataError(str(path), f"is no journal of Optuna ({error!r})", REMEDY) from None


def check_journal(path: Path) -> None:
    """Raise DataError unless every whole line is a JSON object with an Optuna operation."""
    try:
        contents = read_regular_file(path, MAX_JOURNAL_BYTES)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", REMEDY) from None
    for number, line in enumerate(contents.split(b"\n")[:-1], 1):
        where = f"{path}, line {number}"
        if len(line) > _MAX_LINE_BYTES:
            raise DataError(where, f"has more than {_MAX_LINE_BYTES:,} bytes", REMEDY)
        try:
            operation = parse_json_object(line).get("op_code")
        except ValueError as error:
            raise DataError(where, f"is no record ({error})", REMEDY) from None
        if type(operation) is not int or operation not in _OPERATIONS:
            raise DataError(where, f"op_code is {in_brief(operation)}", REMEDY)


def _backend(path: Path) -> "JournalFileBackend":
    from optuna.storages.journal import JournalFileBackend

    class WholeLines(JournalFileBackend):
        """Journal file of whole lines; Optuna's own leaves half a line behind on a full disk."""

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
            left = memoryview(lines.encode())
            with (
                held(_lock(path)),
                path.open("ab", buffering=0) as file,
                whole_or_nothing(file.fileno()),
            ):
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())

    return WholeLines(str(path), lock_obj=_lock(path))


@contextmanager
def study_lock(directory: Path) -> Iterator[None]:
    """The lock for claiming a trial, held by one process; a dead holder loses it after 30 s."""
    with held(_lock(directory / "claims")):
        yield


@contextmanager
def held(lock: "JournalFileOpenLock") -> Iterator[None]:
    """Hold a lock of Optuna's."""
    lock.acquire()
    try:
        yield
    finally:
        with suppress(RuntimeError):  # lock taken over from a process that slept
            lock.release()


def _lock(path: Path) -> "JournalFileOpenLock":
    from optuna.storages.journal import JournalFileOpenLock

    return JournalFileOpenLock(str(path))


def _cut_unfinished_line(path: Path) -> None:
    with path.open("rb+") as file:
        end = file.read().rfind(b"\n") + 1
        file.truncate(end)


JOURNAL = "journal.log"
REPEATS = "repeats"  # the study of fresh seeds, beside those of the arms
Status = Literal["waiting", "running", "ended", "interrupted"]

LEAST_FOR_IMPORTANCE = 5  # trials; fewer have one good trial or none
BEST_SHARE = 0.25  # share of trials that are "good"

_LEAST_RANDOM, _MOST_RANDOM = 4, 10  # trials drawn at random before TPE has enough data
_PRUNED = ("pruned", "refused")
_ENDINGS: tuple[Ended, ...] = get_args(Ended)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """One trial of the journal; `settings` and later fields are empty until recorded."""

    arm: str
    number: int
    status: Status
    settings: dict[str, Value]
    seed: int
    subject: str
    value: float | None
    ended: Ended | None
    samples: int | None
    seconds: float | None
    accuracies: tuple[float, ...]
    evaluated_at: tuple[int, ...]  # samples, one for each accuracy

    @property
    def directory_name(self) -> str:
        """Name of its run directory, below `trials`."""
        return f"{self.arm}_{self.number:05d}"


class Store:
    """The journal of a study directory; several processes may have it open at once."""

    def __init__(self, directory: Path, arms: Sequence[str], seed: int) -> None:
        """Open or begin the journal. Raises DataError for a damaged one."""
        from optuna import create_study

        self._directory = directory
        self._seed = seed
        with study_lock(directory):
            storage = open_journal(directory / JOURNAL)
            self._studies = {
                name: create_study(
                    storage=storage, study_name=name, direction="minimize", load_if_exists=True
                )
                for name in (*arms, REPEATS)
            }

    def locked(self) -> AbstractContextManager[None]:
        """Hold the lock, as for counting trials and claiming one."""
        return study_lock(self._directory)

    def directory_of(self, arm: str, number: int) -> Path:
        """The run directory of a trial."""
        return self._directory / "trials" / f"{arm}_{number:05d}"

    def trials(self, arm: str) -> list[TrialRecord]:
        """All trials of an arm, by number."""
        return [as_record(arm, each) for each in self._studies[arm].get_trials(deepcopy=False)]

    def count(self, arm: str | None, *status: Status) -> int:
        """Number of an arm's trials (None: all arms) in one of these states."""
        studies = self._studies.values() if arm is None else [self._studies[arm]]
        found = [each for study in studies for each in study.get_trials(deepcopy=False)]
        return sum(_status(each) in status for each in found)

    def claim(self, arm: str, budget: int) -> "Trial":
        """Begin a trial of an arm: one that waits for its repeat, or a new one.

        Draws depend on the seed and the number of earlier trials that count, so that an interrupted
        study continues as it would have. `budget` is the number of trials in all.
        """
        from optuna.samplers import TPESampler

        study = self._studies[arm]
        counted = self.count(arm, "running", "ended")
        study.sampler = TPESampler(
            seed=self._seed * 1_000_003 + counted,
            n_startup_trials=min(_MOST_RANDOM, max(_LEAST_RANDOM, budget // 3)),
            constant_liar=True,
        )
        return self._begin(study)

    def claim_repeat(self, subject: str, settings: dict[str, Value], seed: int) -> "Trial":
        """Begin a training with these settings and a fresh seed."""
        trial = self._begin(self._studies[REPEATS])
        trial.set_user_attr("subject", subject)
        self.note(trial, settings, seed)
        return trial

    def note(self, trial: "Trial", settings: dict[str, Value], seed: int) -> None:
        """Record the settings that a trial trains with."""
        trial.set_user_attr("settings", settings)
        trial.set_user_attr("seed", seed)

    def end(self, arm: str, trial: "Trial", result: Result) -> bool:
        """End a trial; False if another process had taken it for lost."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        state = TrialState.COMPLETE
        if result.ended in _PRUNED:
            state = TrialState.PRUNED
        elif result.value is None:
            state = TrialState.FAIL
        facts = {
            "ended": result.ended,
            "samples": result.samples,
            "seconds": result.seconds,
            "accuracies": [accuracy for _, accuracy in result.curve],
            "evaluated_at": [samples for samples, _ in result.curve],
        }
        try:
            for number, (_, accuracy) in enumerate(result.curve, 1):
                trial.report(1 - accuracy, number)
            for key, fact in facts.items():
                trial.set_user_attr(key, fact)
            values = result.value if state == TrialState.COMPLETE else None
            self._studies[arm].tell(trial, values, state=state)
        except (UpdateFinishedTrialError, ValueError):  # ValueError: tell notices before it writes
            return False
        if result.ended == "interrupted" and arm != REPEATS:
            with self.locked():
                self._repeat_all(self._studies[arm])
        return True

    def give_up_lost(self) -> list[str]:
        """End trials whose owner is gone, and queue repeats; returns names. Under the lock."""
        from optuna.trial import TrialState

        clock = self._directory / "clock"
        clock.touch()
        now = clock.stat().st_mtime
        lost = []
        for arm, study in self._studies.items():
            for each in study.get_trials(deepcopy=False):
                directory = self.directory_of(arm, each.number)
                status = _status(each)
                if status == "running" and is_lost(directory, each.user_attrs.get("owner"), now):
                    study.tell(each.number, state=TrialState.FAIL, skip_if_finished=True)
                    lost.append(directory.name)
            if arm != REPEATS:  # these are claimed again because they are missing
                self._repeat_all(study)
        return lost

    def importance(self, arm: str) -> dict[str, float]:
        """Each parameter's share in telling good trials from others; {} if unknown.

        PED-ANOVA (arXiv 2304.10255), over trials that reached or missed the target. It is unknown
        for too few trials, or if the best quarter is no better than the rest.
        """
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
        from optuna.trial import TrialState

        study = self._studies[arm]
        complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(complete) < LEAST_FOR_IMPORTANCE or len({each.value for each in complete}) < 2:
            return {}
        evaluator = PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # for equal results; see below
            shares = get_param_importances(study, evaluator=evaluator)
        is_told_apart = len(shares) == 1 or len(set(shares.values())) > 1
        return shares if is_told_apart else {}

    def _begin(self, study: "Study") -> "Trial":
        trial = study.ask()
        trial.set_user_attr("owner", owner())
        directory = self.directory_of(study.study_name, trial.number)
        directory.mkdir(parents=True, exist_ok=True)
        beat(directory)
        return trial

    def _repeat_all(self, study: "Study") -> None:
        """Queue every interrupted trial that was not repeated yet."""
        trials = study.get_trials(deepcopy=False)
        repeated = {each.user_attrs.get("repeats") for each in trials}
        for each in trials:
            if _status(each) == "interrupted" and each.number not in repeated:
                study.enqueue_trial(each.params, user_attrs={"repeats": each.number})


def _status(trial: "FrozenTrial") -> Status:
    from optuna.trial import TrialState

    if trial.state == TrialState.WAITING:
        return "waiting"
    if trial.state == TrialState.RUNNING:
        return "running"
    if trial.state == TrialState.FAIL and trial.user_attrs.get("ended") in (None, "interrupted"):
        return "interrupted"  # None: it was lost before it recorded anything
    return "ended"


def as_record(arm: str, trial: "FrozenTrial") -> TrialRecord:
    """The record of a trial in the journal. Raises DataError if it is not in our form."""
    where = f"{JOURNAL}: trial {trial.number} of {in_brief(arm)}"
    if not isinstance(trial.user_attrs, dict):
        raise DataError(where, "has no facts", REMEDY)
    record = Record(where, trial.user_attrs, REMEDY)
    value = trial.values[0] if isinstance(trial.values, list) and trial.values else None
    if value is not None and not is_number(value):
        raise record.error("value", f"is {in_brief(value)}, no number")
    accuracies = record.values.get("accuracies", [])
    if not isinstance(accuracies, list) or not all(is_number(each) for each in accuracies):
        raise record.error("accuracies", "is no list of numbers")
    evaluated_at = record.values.get("evaluated_at", [])
    if not isinstance(evaluated_at, list) or not all(map(_is_count, evaluated_at)):
        raise record.error("evaluated_at", "is no list of counts")
    return TrialRecord(
        arm=arm,
        number=trial.number,
        status=_status(trial),
        settings=dict(record.record("settings").values) if record.has("settings") else {},
        seed=record.integer("seed") if record.has("seed") else 0,
        subject=record.text("subject") if record.has("subject") else "",
        value=value,
        ended=record.choice("ended", _ENDINGS) if record.has("ended") else None,
        samples=record.integer("samples") if record.has("samples") else None,
        seconds=record.number("seconds") if record.has("seconds") else None,
        accuracies=tuple(accuracies),
        evaluated_at=tuple(evaluated_at),
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53
