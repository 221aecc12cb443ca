"""A lock with one owner for a run's directory; the kernel releases it when the owner ends."""

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

_TRIES = 100  # while other owners end, who remove the file
_TAKEN = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # on this file system
_MOST_BYTES = 500  # of an owner's description


class RunLock:
    """Prevents a second start of a run in `root`; a context for one rank of it.

    The file `.<name>.lock` in `root` names the owner and is removed with the lock. A killed owner
    leaves the file, not the lock. It is a POSIX lock, not flock: children do not inherit it, and
    network file systems support it. A process must not hold a second lock on the same run.

    `root` is the run directory; it is created, and removed again if it stays empty. On the other
    ranks it is None, and this does nothing.
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
            problem, remedy = f"{self._root}: {error.strerror}", "give a directory you can write to"
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
            with suppress(OSError):  # the directory holds a run now
                self._root.rmdir()

    def check(self) -> None:
        """Raise ConfigError if the run has another owner, or the place cannot be written.

        The error is kept until this call, so that all ranks can raise it together.
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
            raise ConfigError("--run-dir", f"{self._path} cannot be made", "give another directory")
        utc = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        owner = f"process {os.getpid()} on host {platform.node()} since {utc} UTC\n"
        os.truncate(self._file, 0)
        os.pwrite(self._file, owner.encode(), 0)

    def _locked(self, root: Path, path: Path) -> int | None:
        """The locked file; None if its owner has just removed it."""
        # Only its owner may open it, otherwise readers could lock it.
        file = not_through_a_link(str(path), os.O_RDWR | os.O_CREAT, mode=0o600)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                said = os.pread(file, _MOST_BYTES, 0).decode(errors="replace").strip()
                os.close(file)
                problem = f"{self._name} in {root} is at work: {said or 'another process'} owns it"
                remedy = "wait for its end, or give another directory"
                raise ConfigError("--run-dir", problem, remedy) from None
            if error.errno not in _NO_LOCKS:
                os.close(file)
                raise
            problem = f"{root} has no locks ({error.strerror})"
            say(f"warning: {problem}: nothing keeps a second start out of this run")
        with suppress(FileNotFoundError):
            # A file with a second name may be something else; we must not write into it.
            if _is_at(file, path) and os.fstat(file).st_nlink == 1:
                return file
        os.close(file)
        return None


def _is_at(file: int, path: Path) -> bool:
    return os.path.samestat(os.fstat(file), os.lstat(path))
