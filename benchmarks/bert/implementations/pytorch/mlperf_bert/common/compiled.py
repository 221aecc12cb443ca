"""Compilation of Python functions to machine code, cached on disk if possible."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba import njit

from mlperf_bert.common.code_caches import set_code_caches
from mlperf_bert.common.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """`function`, compiled by numba when it is first called with arguments of new types.

    The machine code is cached in a directory of the user (`code_caches`); if that cannot be
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
