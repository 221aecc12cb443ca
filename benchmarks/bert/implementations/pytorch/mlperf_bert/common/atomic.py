"""Writing so that nothing is left half-written, and nothing left behind.

Temporary files and directories are renamed when they are complete, lines are written whole, and
directories for temporary files go with their process.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Literal

from mlperf_bert.common.errors import CheckpointError, ConfigError, DataError
from mlperf_bert.common.untrusted import not_through_a_link

NO_ROOM = "check the disk's free space and that it can be written"
_PRIVATE = "mlperf_bert-own-"  # prefix of directories for temporary files
_ABANDONED_S = 60.0  # age from which an unlocked one is nobody's


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it is renamed to `path` on success, deleted on failure.

    Raises DataError when the file cannot be written.
    """
    temporary = _beside(path)
    try:
        temporary.unlink(missing_ok=True)  # a link at this name would be written through
        yield temporary
        # Without the flush a power cut could leave a complete name over incomplete contents.
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        with suppress(OSError):  # a place that cannot be written may refuse the removal too
            temporary.unlink(missing_ok=True)


def write_file(path: Path, contents: bytes) -> None:
    """Write or replace `path` in one step. Raises DataError when it cannot be written."""
    with replaced_file(path) as temporary, temporary.open("xb") as file:
        file.write(contents)


def check_writable(path: Path) -> None:
    """Check that `write_file` could write `path`, without changing it. Raises DataError."""
    temporary = _beside(path)
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise _not_written(path, error) from error


def make_directory(path: Path) -> None:
    """Create a directory and its parents. Raises DataError when that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or "cannot be created"
        raise DataError(str(path), reason, "name a directory that can be written") from error


def is_temporary(name: str, of: Collection[str]) -> bool:
    """True if a file name is `.NAME.PID-MACHINE.tmp` or `.NAME.PID.tmp` for a NAME in `of`.

    A killed writer leaves such files.
    """
    stem, _, writer = name.removesuffix(".tmp").rpartition(".")
    is_ours = name.endswith(".tmp") and writer.partition("-")[0].isdecimal()
    return is_ours and stem.startswith(".") and stem[1:] in of


def remove_temporaries(
    directory: Path, names: Collection[str], *, of: Literal["this machine", "all"] = "all"
) -> None:
    """Remove temporary files of killed writers; no writer of these files may be running there.

    `of` "this machine" keeps those of other machines, whose writers may be running.
    """
    for path in directory.glob(".*.tmp"):
        machine = path.stem.rpartition(".")[2].partition("-")[2]
        if is_temporary(path.name, names) and (of == "all" or machine in ("", _machine())):
            path.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{_machine()}.tmp")


def _machine() -> str:
    """A name for this machine, since processes of two machines may have equal ids."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _not_written(path: Path, error: OSError) -> DataError:
    reason = error.strerror or "cannot be written"
    return DataError(str(path), reason, "check the directory and its free space")


@contextmanager
def new_directory(path: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a directory to fill; it is renamed to `path` on success, deleted on failure.

    `path` must be absent or an empty directory; about `num_bytes` will be written. Raises
    CheckpointError if `path` is taken or cannot be written.
    """
    path = Path(os.path.abspath(path))
    beside = path.with_name(f".{path.name or 'out'}.{os.getpid()}.partial")
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(str(path), "is there already", "name a new directory")
        beside.mkdir(parents=True)
        if shutil.disk_usage(beside).free < num_bytes:
            problem = f"needs {num_bytes / 1e6:,.0f} MB, the disk has less"
            raise CheckpointError(str(path), problem, "name a directory elsewhere")
        yield beside
        beside.rename(path)
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise CheckpointError(str(path), problem, NO_ROOM) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def private_directory() -> tuple[Path, int]:
    """Make a directory of mode 0700 for temporary files, and remove those of killed processes.

    Returns it and a file descriptor that locks it; the lock ends with this process. Raises OSError.
    Those of other machines are left alone, as their locks may not be seen here.
    """
    prefix = f"{_PRIVATE}{_machine()}-"
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            _remove_abandoned(path)
    made = Path(tempfile.mkdtemp(prefix=prefix))
    lock = os.open(made, os.O_RDONLY)
    with suppress(OSError):  # without locks nothing is removed either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return made, lock


def _remove_abandoned(path: Path) -> None:
    """Remove a directory of this user whose process has ended. Raises OSError for any other."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(lock)
        if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _ABANDONED_S:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(lock)


@contextmanager
def whole_or_nothing(file: int) -> Iterator[None]:
    """Undo a failed append to an open file.

    The next line would otherwise continue half a line. Raises the body's OSError.
    """
    end = os.fstat(file).st_size
    try:
        yield
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, end)
            os.lseek(file, end, os.SEEK_SET)
        raise


class LineFile:
    """Appends whole lines; each is in the file when `append` returns.

    A line that cannot be written is dropped, because training is worth more than its log. `warn` is
    called for the first dropped line, and again only after a line was written.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], *, continued: bool = False) -> None:
        """Open a new file, or an existing one if `continued`.

        Raises ConfigError if that fails.
        """
        self._path = path
        self._warn = warn
        try:
            mode = "a" if continued else "x"
            self._file = FileIO(path, mode, opener=not_through_a_link)
        except OSError as error:
            remedy = "give a run directory that you can write to"
            raise ConfigError(str(path), f"cannot be opened ({error.strerror})", remedy) from None
        self._file.seek(0, os.SEEK_END)
        self._is_failing = False

    def append(self, line: str) -> None:
        """Write a line; the line end is added."""
        contents = memoryview(f"{line}\n".encode())
        try:
            with whole_or_nothing(self._file.fileno()):
                while contents:
                    contents = contents[self._file.write(contents) :]
        except OSError as error:
            if not self._is_failing:
                self._warn(f"{self._path} cannot be written ({error.strerror}): going on without")
            self._is_failing = True
        else:
            self._is_failing = False

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()
