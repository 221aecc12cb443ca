"""Compilation of Python functions to machine code, kept on disk wherever that is possible."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """`function`, compiled by numba when it is first called with arguments of new types.

    The machine code goes beside the source file or, where that directory cannot be written, into
    the user's cache directory. Where neither can, every process compiles for itself. Other threads
    go on while it runs.

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
    try:
        return cast(Function, njit(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # numba's "no locator available": no place for the cache
        return cast(Function, njit(nogil=True, **options)(function))


def cache_directory(function: Any) -> str | None:
    """Where the machine code of a compiled function is kept; None where it is not."""
    path: str | None = function.stats.cache_path
    return path
