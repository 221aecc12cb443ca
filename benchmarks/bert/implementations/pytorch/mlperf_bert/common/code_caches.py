"""What this process and its children may run as code.

Directories for compiled code: numba, Triton and torch run the code they find there.

Only this user and root may write such a directory. It is the one named by the compiler's variable,
else one in the user's cache directory, else a temporary one of this process and its children.
"""

import atexit
import os
import shutil
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

from mlperf_bert.common.atomic import private_directory
from mlperf_bert.common.errors import ConfigError

_COMPILERS = {
    "NUMBA_CACHE_DIR": "numba",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_MAY_ENTER = stat.S_IXGRP | stat.S_IXOTH


def keep_this_directory_from_children() -> None:
    """Keep the current directory, which may be another user's, out of what child processes import.

    A child that Python starts by itself, as for a pool of processes, would look there first.
    """
    os.environ["PYTHONSAFEPATH"] = "1"


def set_code_caches() -> dict[str, Path]:
    """Create the directory of every compiler, and set each compiler's variable to it.

    Call it before anything is compiled. Raises ConfigError for a directory that the user has named
    and others can write.
    """
    missing = [variable for variable in _COMPILERS if not os.environ.get(variable)]
    if missing:
        root = _usual() or _made_by()[0]
        os.environ.update({name: str(root / _COMPILERS[name]) for name in missing})
    found = {variable: Path(os.environ[variable]) for variable in _COMPILERS}
    for variable, path in found.items():
        try:
            found[variable] = _own(path)
            _check_contents(found[variable])
        except OSError as error:
            remedy = f"make it yours alone (chmod 700), or unset {variable}"
            raise ConfigError(variable, f"{path} {error.strerror}", remedy) from None
        os.environ[variable] = str(found[variable])
    return found


def remove_temporary() -> None:
    """Remove this process's temporary directory; call it before an exit that skips atexit."""
    if _made_by.cache_info().currsize:
        path, maker = _made_by()
        if maker == os.getpid():  # not in a child that was forked
            shutil.rmtree(path, ignore_errors=True)
            _made_by.cache_clear()


def _usual() -> Path | None:
    """Our directory in the user's cache; None if that is not writable, or others can write it."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return _own(home / "mlperf_bert") if home.is_absolute() else None
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None


@cache
def _made_by() -> tuple[Path, int]:
    """A temporary directory with an unpredictable name, and the process that made it."""
    atexit.register(remove_temporary)
    directory, _ = private_directory()  # locked until this process ends
    return directory, os.getpid()


def _own(path: Path) -> Path:
    """`path` without links, created with its parents if missing.

    Raises OSError if another user owns, may write or may replace it.
    """
    path = path.absolute()
    for each in (*reversed(path.parents), path):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
    if path.is_symlink():
        raise _refusal("is a link")
    path = path.resolve(strict=True)
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise _refusal("is not a directory")
    if found.st_uid != os.geteuid():
        raise _refusal("belongs to somebody else")
    if found.st_mode & _OTHERS_MAY_WRITE:
        raise _refusal("may be written by others")
    if not os.access(path, os.W_OK | os.X_OK):
        raise _refusal("cannot be written")
    for parent in path.parents:
        above = parent.stat()
        if above.st_uid not in (0, os.geteuid()):
            raise _refusal(f"is in {parent}, which belongs to somebody else")
        if above.st_mode & _OTHERS_MAY_WRITE and not above.st_mode & stat.S_ISVTX:
            raise _refusal(f"is in {parent}, which others may write")
    return path


def _check_contents(path: Path) -> None:
    """Raise OSError if others could write the files that a compiler creates in `path`."""
    umask = os.umask(0o077)
    os.umask(umask)
    if path.stat().st_mode & _OTHERS_MAY_ENTER and ~umask & _OTHERS_MAY_WRITE:
        raise _refusal(f"may be entered by others, and umask {umask:03o} lets them write in it")


def _refusal(reason: str) -> OSError:
    return PermissionError(None, reason)
