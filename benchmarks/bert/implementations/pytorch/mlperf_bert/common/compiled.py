"""Compilation of Python functions to machine code, kept on disk wherever that is possible."""

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

    The machine code goes into a directory of the user's own (`code_caches`); where that cannot be
    written, every process compiles for itself. Other threads go on while it runs.

    numba looks for changes in the function's own source file only. So a compiled function must
    not call one of another file: after a change there the old machine code would go on being used.
    It compares the time of change and the size only: a file put back with both keeps the old code.
    """
    return _compile(function)


def compiled_arithmetic(function: Function) -> Function:
    """`compiled`, for loops over floats that shall become vector instructions.

    A division by zero gives an infinity or NaN and raises nothing, sums may be taken in another
    order, and a product that is added may be rounded once. NaN and infinities are kept.
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
    """Where `function` is compiled or loaded: ConfigError if its cache is damaged or full."""
    try:
        yield
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        where = function.stats.cache_path or "numba's cache"
        remedy = "delete its .nbi and .nbc files, or make room"
        raise ConfigError(where, f"cannot be used ({error})", remedy) from None
