"""Bounds and meanings of settings, which the annotations of a dataclass's fields contain."""

import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from mlperf_bert.errors import ConfigError
from mlperf_bert.files import in_brief

UNLIMITED, SMALLEST = 1e38, 1e-38  # close to the largest and smallest normal numbers of fp32


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range from `low` to `high`, both included."""

    low: float
    high: float

    def check(self, where: str, value: float, name: str = "") -> None:
        """Raise ConfigError for a number outside the range, or for NaN.

        `where` is the option, setting or file to blame. `name` is the setting in that file.
        """
        if not self.low <= value <= self.high:
            raise ConfigError(where, f"{name} must be {self}, not {in_brief(value)}".lstrip(), "")

    def __str__(self) -> str:
        """Return the range in words, as in "from 1 to 65,536" or "above 0"."""
        if self.high >= UNLIMITED:
            return "above 0" if self.low == SMALLEST else f"at least {_in_words(self.low)}"
        return f"from {_in_words(self.low)} to {_in_words(self.high)}"


@cache
def bounds_of(kind: type) -> dict[str, Bounds]:
    """Return the bounds of a dataclass's fields by name."""
    return _annotations(kind, Bounds)


@cache
def meanings_of(kind: type) -> dict[str, str]:
    """Return the sentence that explains each field of a section, by name."""
    return _annotations(kind, str)


def _annotations(kind: type, of: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        name: extra
        for name, hint in hints.items()
        for extra in getattr(hint, "__metadata__", ())
        if isinstance(extra, of)
    }


def option_name(field: str) -> str:
    """Return the command-line option that sets a field."""
    return f"--{field.replace('_', '-')}"


def check_bounds(values: Any, name_of: Callable[[str], str] = option_name) -> None:
    """Check the numbers of a dataclass. `name_of` turns a field into its name in messages.

    A word or None instead of a number is not checked.

    Raises:
        ConfigError: a number is outside its bounds.
    """
    for field, bounds in bounds_of(values.__class__).items():
        value = getattr(values, field)
        if isinstance(value, int | float):
            bounds.check(name_of(field), value)


def _in_words(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.10g}"
