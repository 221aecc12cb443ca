"""Set up compiled code: its cache directories, numba's decorators, and the check for Triton.

numba, Triton and torch run the code that they find in their cache directories. Therefore only this
user and root may have write access to such a directory. The user can set the directory in an
environment variable of the compiler. Otherwise the program uses a directory in the user's cache. If
that cache is not safe, the program uses a temporary directory for this process and its children.

This module reads the environment, because the compilers find their directories and programs there.
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
    """Prevent child processes from importing modules from the current directory.

    Another user may own that directory. A child that Python itself starts, for example for a
    process pool, would search that directory first.
    """
    os.environ["PYTHONSAFEPATH"] = "1"


def set_code_caches() -> dict[str, Path]:
    """Create the cache directory of each compiler, and store its path in an environment variable.

    Returns the directory for each variable. Call this function before anything is compiled. Raises
    ConfigError if the user set a variable to a directory that others can write to.
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
            remedy = f"set {variable} to a private directory (chmod 700), or unset it"
            raise ConfigError(variable, f"{path} {error.strerror}", remedy) from None
        os.environ[variable] = str(found[variable])
    return found


def remove_temporary() -> None:
    """Delete this process's temporary cache directory. Call this before `os._exit`."""
    if _made_by.cache_info().currsize:
        path, maker = _made_by()
        if maker == os.getpid():  # a forked child must not remove it
            shutil.rmtree(path, ignore_errors=True)
            _made_by.cache_clear()


def _usual() -> Path | None:
    """Return this program's directory in the user's cache, or None if it is unusable or unsafe."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return _own(home / "mlperf_bert") if home.is_absolute() else None
    except (OSError, RuntimeError):  # RuntimeError if there is no home directory
        return None


@cache
def _made_by() -> tuple[Path, int]:
    """Create a temporary directory with an unpredictable name.

    Returns its path and the id of this process.
    """
    atexit.register(remove_temporary)
    return Path(tempfile.mkdtemp(prefix="mlperf_bert-")), os.getpid()


def _own(path: Path) -> Path:
    """Create `path` and its parents if they are missing, and return it with links resolved.

    Raises OSError if another user owns the directory, can write to it or can replace it.
    """
    path = path.absolute()
    for each in (*reversed(path.parents), path):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
    if path.is_symlink():
        raise _refusal("is a symbolic link")
    path = path.resolve(strict=True)
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise _refusal("is not a directory")
    if found.st_uid != os.geteuid():
        raise _refusal("belongs to another user")
    if found.st_mode & _OTHERS_MAY_WRITE:
        raise _refusal("is writable by other users")
    if not os.access(path, os.W_OK | os.X_OK):
        raise _refusal("is not writable")
    for parent in path.parents:
        above = parent.stat()
        if above.st_uid not in (0, os.geteuid()):
            raise _refusal(f"is in {parent}, which belongs to another user")
        if above.st_mode & _OTHERS_MAY_WRITE and not above.st_mode & stat.S_ISVTX:
            raise _refusal(f"is in {parent}, which is writable by other users")
    return path


def _check_contents(path: Path) -> None:
    """Raise OSError if other users could change the files that a compiler creates in `path`."""
    umask = os.umask(0o077)
    os.umask(umask)
    if path.stat().st_mode & _OTHERS_MAY_ENTER and ~umask & _OTHERS_MAY_WRITE:
        raise _refusal(f"is open to other users, and umask {umask:03o} lets them change its files")


def _refusal(reason: str) -> OSError:
    return PermissionError(None, reason)


Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile `function` with numba at its first call with arguments of new types.

    The machine code is cached in a directory of the user (`set_code_caches`). If that directory
    cannot be written, every process compiles the function again. The compiled function releases the
    GIL.

    numba detects changes only in the function's own source file, by modification time and size. A
    compiled function must therefore not call a compiled function of another file, because numba
    would keep using the old code after a change there. For the same reason, if a file is restored
    with its old time and size, numba keeps using the old code.
    """
    return _compile(function)


def compiled_arithmetic(function: Function) -> Function:
    """Compile `function` like `compiled`, and allow the compiler to vectorize loops over floats.

    Division by zero gives an infinity or NaN instead of an error. Sums may be reordered, and a
    multiplication and an addition may be fused, which rounds once instead of twice. NaN and
    infinities are preserved.
    """
    return _compile(function, error_model="numpy", fastmath={"reassoc", "contract"})


def _compile(function: Function, **options: Any) -> Function:
    import numba  # imported here, so that the command line can set the directories without it
    from numba import njit

    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return function
    directory = set_code_caches()["NUMBA_CACHE_DIR"]
    # numba reads the variable at its import, which may have happened before.
    numba.config.CACHE_DIR = str(directory)  # type: ignore[attr-defined]
    with suppress(RuntimeError):  # numba's "no locator available": it finds no usable directory
        made = njit(cache=True, nogil=True, **options)(function)
        if Path(made.stats.cache_path).is_relative_to(directory):  # not next to the source
            return cast(Function, made)
    return cast(Function, njit(nogil=True, **options)(function))


@contextmanager
def usable_cache(function: Any) -> Iterator[None]:
    """Raise ConfigError if numba's cache fails while the with block compiles or loads `function`.

    The cache fails if its files are damaged or cannot be written.
    """
    try:
        yield
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        where = function.stats.cache_path or "numba's cache"
        remedy = "delete the .nbi and .nbc files of this cache, or free some disk space"
        problem = f"the cache of compiled code cannot be used ({error})"
        raise ConfigError(where, problem, remedy) from None


_C_COMPILERS = ("gcc", "clang")  # programs that Triton searches for if CC is not set


def why_triton_cannot_compile() -> str | None:
    """Return the reason why Triton cannot compile kernels here, or None if it can.

    The function compiles and measures nothing, so the answer does not change as long as the machine
    stays the same. The search for a compiler and headers follows `triton/runtime/build.py` in
    Triton 3.7.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    named = os.environ.get("CC")
    if named is not None and shutil.which(named) is None:
        return f"the environment variable CC is {named!r}, but there is no such program"
    if named is None and not any(shutil.which(name) for name in _C_COMPILERS):
        return "there is no C compiler, because neither gcc nor clang is installed"
    header = _directory_of_headers() / "Python.h"
    if not header.is_file():
        return f"{header} is missing (install python3-dev or python3-devel)"
    return None


def _directory_of_headers() -> Path:
    """Return the directory in which Triton's C compiler searches for Python's headers."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's scheme, which names a directory without headers
        scheme = "posix_prefix"
    return Path(sysconfig.get_paths(scheme=scheme)["include"])
