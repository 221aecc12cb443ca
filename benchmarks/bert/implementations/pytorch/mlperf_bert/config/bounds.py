"""Read the bounds and meanings of settings from the annotations of a dataclass's fields."""

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
    """A range of numbers from `low` to `high`, both inclusive."""

    low: float
    high: float

    def check(self, where: str, value: float, name: str = "") -> None:
        """Raise ConfigError if `value` is outside the range or NaN.

        `where` is the option, setting or file that the message blames. If `where` is a file, `name`
        is the setting in it.
        """
        if not self.low <= value <= self.high:
            raise ConfigError(where, f"{name} must be {self}, not {in_brief(value)}".lstrip(), "")

    def __str__(self) -> str:
        """Return the range as text, such as "from 1 to 65,536" or "above 0"."""
        if self.high >= UNLIMITED:
            return "above 0" if self.low == SMALLEST else f"at least {_in_words(self.low)}"
        return f"from {_in_words(self.low)} to {_in_words(self.high)}"


@cache
def bounds_of(kind: type) -> dict[str, Bounds]:
    """Return the bounds of a dataclass's fields, by field name."""
    return _annotations(kind, Bounds)


@cache
def meanings_of(kind: type) -> dict[str, str]:
    """Return the sentences that explain the fields of a section, by field name."""
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
    """Return the command-line option that sets a field, such as `--max-steps` for `max_steps`."""
    return f"--{field.replace('_', '-')}"


def check_bounds(values: Any, name_of: Callable[[str], str] = option_name) -> None:
    """Raise ConfigError if a number in a dataclass instance is outside its bounds.

    `name_of` turns the name of a field into the name that messages use. Values that are not numbers
    are not checked.
    """
    for field, bounds in bounds_of(values.__class__).items():
        value = getattr(values, field)
        if isinstance(value, int | float):
            bounds.check(name_of(field), value)


def _in_words(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.10g}"
