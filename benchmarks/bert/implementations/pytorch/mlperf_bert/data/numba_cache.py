"""One line for a user whose cache of compiled code cannot be used."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlperf_bert.common.compiled import cache_directory
from mlperf_bert.common.errors import ConfigError


@contextmanager
def usable_cache(function: Callable[..., Any]) -> Iterator[None]:
    """Where `function` is compiled or loaded: ConfigError if its cache is damaged or full."""
    try:
        yield
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        where = cache_directory(function) or "numba's cache"
        remedy = "delete its .nbi and .nbc files, or make room"
        raise ConfigError(where, f"cannot be used ({error})", remedy) from None
