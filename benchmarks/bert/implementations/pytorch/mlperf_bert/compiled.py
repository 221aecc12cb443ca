"""Code that is compiled here: where it is kept, numba's functions, and whether Triton can.

numba, Triton and torch run the code they find in their directories for compiled code. Only this
user and root may write such a directory. It is the one named by the compiler's variable, else one
in the user's cache directory, else a temporary one of this process and its children.

This file reads the environment, because compilers take their directories and programs from there.
"""

import atexit
import importlib.util
import os
import pickle
import shutil
import stat
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from mlperf_bert.errors import ConfigError

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
    return Path(tempfile.mkdtemp(prefix="mlperf_bert-")), os.getpid()


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


Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """`function`, compiled by numba when it is first called with arguments of new types.

    The machine code is cached in a directory of the user (`set_code_caches`); if that cannot be
    written, every process compiles for itself. The function releases the GIL.

    numba checks only the function's own source file for changes, by time and size. So a compiled
    function must not call one of another file: numba would keep using the old code after a change
    there. A file restored with its old time and size keeps the old code too.
    """
    return _compile(function)


def compiled_arithmetic(function: Function) -> Function:
    """`compiled`, for loops over floats that the compiler should vectorise.

    Division by zero gives an infinity or NaN without an error, sums may be reordered, and
    multiply-adds may be fused (rounded once). NaN and infinities are kept.
    """
    return _compile(function, error_model="numpy", fastmath={"reassoc", "contract"})


def _compile(function: Function, **options: Any) -> Function:
    import numba  # here, because the command line sets the directories without it
    from numba import njit

    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return function
    directory = set_code_caches()["NUMBA_CACHE_DIR"]
    # numba may have been imported before.
    numba.config.CACHE_DIR = str(directory)  # type: ignore[attr-defined]
    with suppress(RuntimeError):  # numba's "no locator available": no place for the cache
        made = njit(cache=True, nogil=True, **options)(function)
        if Path(made.stats.cache_path).is_relative_to(directory):  # else beside the source
            return cast(Function, made)
    return cast(Function, njit(nogil=True, **options)(function))


@contextmanager
def usable_cache(function: Any) -> Iterator[None]:
    """Compile or load `function` in this context: ConfigError if its cache is damaged or full."""
    try:
        yield
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        where = function.stats.cache_path or "numba's cache"
        remedy = "delete its .nbi and .nbc files, or make room"
        raise ConfigError(where, f"cannot be used ({error})", remedy) from None


_C_COMPILERS = ("gcc", "clang")  # programs that Triton searches for, if CC is not set


def why_triton_cannot_compile() -> str | None:
    """The reason why Triton cannot compile kernels here; None if it can.

    Nothing is compiled or measured, so the answer is always the same on a machine that does not
    change. The search for a compiler and headers is that of `triton/runtime/build.py` in
    Triton 3.7.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    named = os.environ.get("CC")
    if named is not None and shutil.which(named) is None:
        return f"the environment variable CC is {named!r}, and there is no such program"
    if named is None and not any(shutil.which(name) for name in _C_COMPILERS):
        return "there is no C compiler: neither gcc nor clang is installed"
    header = _directory_of_headers() / "Python.h"
    if not header.is_file():
        return f"{header} is missing; it is in the package python3-dev or python3-devel"
    return None


def _directory_of_headers() -> Path:
    """The directory in which Triton has its C compiler look for Python's headers."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's; it names a directory that has no headers
        scheme = "posix_prefix"
    return Path(sysconfig.get_paths(scheme=scheme)["include"])
