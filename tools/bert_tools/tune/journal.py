"""Opens the study's journal: Optuna's own format, one JSON object a line, checked before it reads.

Journal files need no database and no file locks of the kernel, so workers on several nodes can
share one over NFS. Nothing in them is a pickle: Optuna has pickles for Redis alone.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlperf_bert.common.atomic import whole_or_nothing
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.untrusted import in_brief, parse_json_object, read_regular_file

if TYPE_CHECKING:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

MAX_JOURNAL_BYTES = 64 * 2**20  # 12,000 trainings with twenty evaluations each
_MAX_LINE_BYTES = 2**20  # accuracies of 10,000 evaluations have 220 kB
_OPERATIONS = range(11)
REMEDY = "use the journal as tune wrote it, or begin a new study"


def need_optuna() -> None:
    """Raise ConfigError where Optuna is not installed."""
    try:
        import optuna
    except ImportError:
        remedy = "run in the checkout: tools/venv.sh tune"
        raise ConfigError("tune", "Optuna is not installed", remedy) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def open_journal(path: Path) -> "JournalStorage":
    """The storage in that file, made where there is none.

    A last line without its end, of a writer that was killed, is cut off: the next writer's would
    be glued to it. Raises DataError where the file is too large or is no journal.
    """
    from optuna.storages import JournalStorage

    if path.is_symlink():
        raise DataError(str(path), "is a link, and what it leads to would be written to", REMEDY)
    if path.exists():
        with held(_lock(path)):  # so that nobody is in the middle of a line
            check_journal(path)
            _cut_unfinished_line(path)
    try:
        return JournalStorage(_backend(path))
    except Exception as error:  # Optuna takes its journal on trust: anything may come of another
        raise DataError(str(path), f"is no journal of Optuna ({error!r})", REMEDY) from None


def check_journal(path: Path) -> None:
    """Raise DataError unless every whole line is a JSON object with an operation of Optuna's."""
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
        """Optuna's own leaves half a line on a full disk, to which the next writer's is glued."""

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
    """Held by one process at a time while it claims a trial; taken over from a dead one in 30 s."""
    with held(_lock(directory / "claims")):
        yield


@contextmanager
def held(lock: "JournalFileOpenLock") -> Iterator[None]:
    """Hold a lock of Optuna's."""
    lock.acquire()
    try:
        yield
    finally:
        with suppress(RuntimeError):  # of one that was taken over from a process that slept
            lock.release()


def _lock(path: Path) -> "JournalFileOpenLock":
    from optuna.storages.journal import JournalFileOpenLock

    return JournalFileOpenLock(str(path))


def _cut_unfinished_line(path: Path) -> None:
    with path.open("rb+") as file:
        end = file.read().rfind(b"\n") + 1
        file.truncate(end)
