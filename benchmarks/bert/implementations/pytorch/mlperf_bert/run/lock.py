"""Lock a run's directory. The kernel releases the lock when the owning process exits."""

import errno
import fcntl
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from mlperf_bert.errors import ConfigError, say
from mlperf_bert.files import not_through_a_link

_TRIES = 100  # Another owner may remove the file as it exits, so that it must be created again.
_TAKEN = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # on this file system
_MOST_BYTES = 500  # of an owner's description


class RunLock:
    """A context manager that prevents a second start of a run in `root`.

    The file `.<name>.lock` in `root` identifies the owner, and is removed when the lock is
    released. A killed owner leaves the file but not the lock. The lock is a POSIX lock instead of
    flock, because children do not inherit it and network file systems support it. A process must
    not have two locks on the same run.

    `root` is the run directory. The lock creates this directory, and removes it again if it stays
    empty. On ranks other than rank 0, `root` is None and the context manager does nothing.
    """

    def __init__(self, root: Path | None, name: str) -> None:
        self._root = root
        self._path = None if root is None else root / f".{name}.lock"
        self._name = name
        self._has_made_root = False
        self._file: int | None = None
        self._refusal: ConfigError | None = None

    def __enter__(self) -> Self:
        try:
            self._take()
        except ConfigError as error:
            self._refusal = error
        except OSError as error:
            problem = f"{self._root}: {error.strerror}"
            remedy = "use a directory that you can write to"
            self._refusal = ConfigError("--run-dir", problem, remedy)
        return self

    def __exit__(self, *_: object) -> None:
        if self._root is None or self._path is None:
            return
        if self._file is not None:
            with suppress(OSError):
                if _is_at(self._file, self._path):
                    self._path.unlink()
            os.close(self._file)
        if self._has_made_root:
            with suppress(OSError):  # The directory now has a run.
                self._root.rmdir()

    def check(self) -> None:
        """Raise ConfigError if another process owns the run or the directory is not writable.

        The context manager delays the error until this call, so that all ranks can raise it
        together.
        """
        if self._refusal is not None:
            raise self._refusal

    def _take(self) -> None:
        if self._root is None or self._path is None:
            return
        self._root.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_TRIES):
            with suppress(FileExistsError):
                self._root.mkdir()
                self._has_made_root = True
            with suppress(FileNotFoundError):
                self._file = self._locked(self._root, self._path)
            if self._file is not None:
                break
        else:
            problem = f"{self._path} cannot be created"
            raise ConfigError("--run-dir", problem, "use another directory")
        utc = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        owner = f"process {os.getpid()} on host {platform.node()} since {utc} UTC\n"
        os.truncate(self._file, 0)
        os.pwrite(self._file, owner.encode(), 0)

    def _locked(self, root: Path, path: Path) -> int | None:
        """Open and lock the file. Return its descriptor, or None if the owner removed it."""
        # Only its owner may open it, because otherwise readers could lock it.
        file = not_through_a_link(str(path), os.O_RDWR | os.O_CREAT, mode=0o600)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                owner = os.pread(file, _MOST_BYTES, 0).decode(errors="replace").strip()
                os.close(file)
                problem = f"{self._name} in {root} is in use by {owner or 'another process'}"
                remedy = "wait until this process exits, or use another run directory"
                raise ConfigError("--run-dir", problem, remedy) from None
            if error.errno not in _NO_LOCKS:
                os.close(file)
                raise
            problem = f"{root}: the file system does not support locks ({error.strerror})"
            say(f"warning: {problem}, so do not start the same run twice")
        with suppress(FileNotFoundError):
            # A file with a second name may be another file, so nothing may be written to it.
            if _is_at(file, path) and os.fstat(file).st_nlink == 1:
                return file
        os.close(file)
        return None


def _is_at(file: int, path: Path) -> bool:
    """Return True if the descriptor `file` refers to the file at `path`."""
    return os.path.samestat(os.fstat(file), os.lstat(path))
