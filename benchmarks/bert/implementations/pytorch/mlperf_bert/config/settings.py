"""Look up the settings of a run, with their types, defaults, allowed values and meanings."""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from mlperf_bert.config.bounds import Bounds, bounds_of, meanings_of
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.errors import ConfigError
from mlperf_bert.files import in_brief
from mlperf_bert.suggestions import did_you_mean, or_list

_KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The definition of one setting, whose name is `section.field`."""

    name: str
    kinds: tuple[Any, ...]  # the types that a value may have; a Literal is its list of words
    default: Any  # dataclasses.MISSING if every config must set it
    bounds: Bounds | None  # of a number
    meaning: str

    @property
    def section(self) -> str:
        """Name of the setting's section."""
        return self.name.partition(".")[0]

    @property
    def field(self) -> str:
        """Name of the setting within its section."""
        return self.name.partition(".")[2]

    @property
    def is_required(self) -> bool:
        """True if the setting has no default, so that every config must set it."""
        return self.default is dataclasses.MISSING

    @property
    def words(self) -> tuple[str, ...]:
        """The words that are allowed as values of the setting."""
        literals = (kind for kind in self.kinds if typing.get_origin(kind) is typing.Literal)
        return tuple(word for literal in literals for word in typing.get_args(literal))

    @property
    def allowed(self) -> str:
        """The allowed values as text, such as "an integer from 1 to 256" or "'cpu' or 'cuda'"."""
        within = f" {self.bounds}".replace(" at least", " of at least") if self.bounds else ""
        return or_list(
            [kind + within * (kind in ("an integer", "a number")) for kind in self._types]
        )

    @property
    def _types(self) -> list[str]:
        """The allowed types as text, followed by every allowed word."""
        numbers = [_KINDS[kind] for kind in self.kinds if kind in _KINDS]
        return [*numbers, *map(repr, self.words)]

    def check(self, value: Any, origin: str) -> Any:
        """Return `value` converted to the setting's type.

        `origin` names the source of the value in messages. Raises ConfigError if the value is not
        allowed.
        """
        if isinstance(value, str) and value in self.words:
            return value
        checked = _converted(value, self.kinds)
        if checked is None:
            problem = f"{self.name} must be {or_list(self._types)}, not {in_brief(value)}"
            remedy = did_you_mean(value, self.words) if isinstance(value, str) else ""
            raise ConfigError(origin, problem, remedy)
        if isinstance(checked, str) and not checked.isprintable():
            problem = f"{self.name} must contain only printable characters, not {in_brief(checked)}"
            raise ConfigError(origin, problem, "")
        if self.bounds is not None:
            self.bounds.check(origin, checked, self.name)
        return checked


@cache
def all_settings() -> Mapping[str, Setting]:
    """Return all settings by their names `section.field`, in the order of the sections."""
    found = {}
    for section, kind in sections().items():
        hints, bounds, meanings = typing.get_type_hints(kind), bounds_of(kind), meanings_of(kind)
        for field in dataclasses.fields(kind):
            hint, name = hints[field.name], f"{section}.{field.name}"
            is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
            found[name] = Setting(
                name=name,
                kinds=typing.get_args(hint) if is_union else (hint,),
                default=field.default,
                bounds=bounds.get(field.name),
                meaning=meanings.get(field.name, ""),
            )
    return found


@cache
def sections() -> Mapping[str, type]:
    """Return the dataclasses of all sections, by the name of the section."""
    return typing.get_type_hints(RunConfig)


def find_setting(name: str, origin: str) -> Setting:
    """Return the setting `name`. Raises ConfigError with similar names if it does not exist."""
    found = all_settings().get(name)
    if found is None:
        raise unknown_setting(name, origin)
    return found


def unknown_setting(name: str, origin: str, more: Sequence[str] = ()) -> ConfigError:
    """Return the error for an unknown setting.

    The error suggests similar settings, and similar names from `more`.
    """
    section, is_dotted, _ = name.partition(".")
    shown = section if is_dotted and section in sections() else ""
    otherwise = f"see `{' '.join(['mlperf_bert config list', shown]).strip()}`"
    remedy = did_you_mean(name, [*all_settings(), *more], otherwise)
    return ConfigError(origin, f"unknown setting {in_brief(name)}", remedy)


def _converted(value: Any, kinds: Sequence[Any]) -> Any:
    """Return `value` as one of the types `kinds`, or None if it has none of these types."""
    for kind in kinds:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            with suppress(OverflowError):
                return float(value)
    return None
