"""The range of every number that a user gives, said once: on its field, `Annotated[int, Bounds]`.

A range is wide: what this software can hold, not what is wise. A value is checked as soon as its
dataclass is built, before anything is made of it.
"""

import dataclasses
import typing
from collections.abc import Callable
from functools import cache
from typing import Any

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.untrusted import in_brief


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """From `low` to `high`, both included."""

    low: float
    high: float

    def check(self, where: str, value: float) -> None:
        """Raise ConfigError naming `where` and the range for a number outside it, or for NaN."""
        if not self.low <= value <= self.high:
            raise ConfigError(where, f"is {in_brief(value)}", f"set it within {self}")

    def __str__(self) -> str:
        return f"{_in_words(self.low)} .. {_in_words(self.high)}"


@cache
def bounds_of(kind: type) -> dict[str, Bounds]:
    """The bounds of a dataclass's fields by name, of a part of a union too."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        name: extra
        for name, hint in hints.items()
        for part in (hint, *typing.get_args(hint))
        for extra in getattr(part, "__metadata__", ())
        if isinstance(extra, Bounds)
    }


def option_name(field: str) -> str:
    """The option of the command line that sets a field."""
    return f"--{field.replace('_', '-')}"


def check_bounds(values: Any, name_of: Callable[[str], str] = option_name) -> None:
    """Check the numbers of a dataclass; `name_of` a field is what messages call it.

    Raises ConfigError. A word or None in the place of a number is left alone.
    """
    for field, bounds in bounds_of(values.__class__).items():
        value = getattr(values, field)
        if isinstance(value, int | float):
            bounds.check(name_of(field), value)


def _in_words(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.10g}"
