"""One owner of a run's directory: a lock that the kernel lets go with the process that has it."""

import errno
import fcntl
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from mlperf_bert.common.errors import ConfigError, say
from mlperf_bert.common.untrusted import not_through_a_link

_TRIES = 100  # while other owners leave, who take the file away with them
_TAKEN = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # on this file system
_MOST_BYTES = 500  # of what an owner says of itself


class RunLock:
    """Keeps other starts out of a run of `root` while used as a context, on one rank of it.

    The file `.<name>.lock` in `root` says who has the lock and goes with it. A killed owner leaves
    the file, not the lock. The lock is POSIX's and not flock's: children do not inherit it, and
    network file systems know it. A process must hold no second one on the same run.

    `root` is the run directory, which is made, and goes again where nothing else is left in it; it
    is None on the other ranks, for which this does nothing.
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
            with suppress(OSError):  # of a directory that has a run in it now
                self._root.rmdir()

    def check(self) -> None:
        """Raise ConfigError where the run has another owner, or the place cannot be written.

        It is not raised at once, so that all ranks can raise it together.
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
        """The file, with the lock; None where an owner has just taken it away."""
        # For its owner alone, or readers lock it.
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
            # Another name of it would have us write into whatever else that is.
            if _is_at(file, path) and os.fstat(file).st_nlink == 1:
                return file
        os.close(file)
        return None


def _is_at(file: int, path: Path) -> bool:
    return os.path.samestat(os.fstat(file), os.lstat(path))
