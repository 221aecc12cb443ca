"""Reader of SPACE.toml: the settings to search, their values and conditions."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.untrusted import in_brief
from mlperf_bert.config.files import checked_setting, config_value, read_toml
from mlperf_bert.config.run_config import RunConfig

Value = bool | int | float | str
Scale = Literal["linear", "log", "log_below_one"]

SECTIONS = ("optim", "schedule", "clip", "parallel", "data", "model")
MOST_PARAMETERS = 64
MOST_CHOICES = 64
_SCALES: tuple[Scale, ...] = ("linear", "log", "log_below_one")
_KEYS = {"key", "low", "high", "scale", "step", "of", "choices", "when"}
_REMEDY = "see docs/tools/tune.md for the form"


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Numbers low .. high, both included; integers in steps of `step` if both ends are.

    `scale` "log_below_one" is logarithmic in 1 - x: for betas. `times_config` multiplies both ends
    by the config's own value.
    """

    low: float
    high: float
    scale: Scale
    step: int
    is_integer: bool
    times_config: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """A choice from some values."""

    values: tuple[Value, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A setting to search if `when` holds, which gives settings and their values."""

    key: str
    domain: Range | Choices
    when: tuple[tuple[str, Value], ...]

    @property
    def name(self) -> str:
        """A name that differs from other ranges of the setting under other conditions."""
        conditions = ", ".join(f"{key}={value}" for key, value in self.when)
        return f"{self.key} [{conditions}]" if conditions else self.key


Space = tuple[Parameter, ...]


class Suggests(Protocol):
    """Protocol of an Optuna trial, which draws values."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool) -> float:
        """Draw a number of low .. high."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int, log: bool) -> int:
        """Draw an integer of low .. high."""

    def suggest_categorical(self, name: str, choices: tuple[Value, ...]) -> Any:
        """Draw one of the choices."""


def read_space(path: Path) -> Space:
    """The parameters in a file. Raises ConfigError that names the wrong one and its fault."""
    tables = read_toml(path, "give a file of [[parameter]] tables, or the name of a shipped space")
    for name in tables:
        if name != "parameter":
            raise ConfigError(f"{path}: {in_brief(name)}", "no such table", "use [[parameter]]")
    entries = tables.get("parameter")
    if not isinstance(entries, list) or not 0 < len(entries) <= MOST_PARAMETERS:
        problem = f"has no list of 1 .. {MOST_PARAMETERS} [[parameter]] tables"
        raise ConfigError(str(path), problem, _REMEDY)
    space = tuple(
        _read_parameter(entry, f"{path}: parameter {number}")
        for number, entry in enumerate(entries, 1)
    )
    _check_keys(space, path)
    return space


def space_for(space: Space, config: RunConfig, without: str | None) -> Space:
    """The space with all ends as plain numbers, less the setting `without`.

    Raises ConfigError for an end that the setting cannot have.
    """
    kept = [each for each in space if each.key != without]
    if not kept:
        raise ConfigError("--space", f"searches nothing but {without}", "add a [[parameter]]")
    return tuple(_resolved(each, config) for each in kept)


def space_as_json(space: Space) -> list[dict[str, Any]]:
    """The space for a file, in values that JSON keeps unchanged."""
    return [
        {
            "key": each.key,
            "domain": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in asdict(each.domain).items()
            },
            "when": dict(each.when),
        }
        for each in space
    ]


def draw(space: Space, trial: Suggests, config: RunConfig) -> dict[str, Value]:
    """Draw settings and their values for one trial, in the order of the space.

    A condition is checked against earlier draws, else against the config.
    """
    drawn: dict[str, Value] = {}
    for parameter in space:
        if all(_now(key, drawn, config) == value for key, value in parameter.when):
            drawn[parameter.key] = _draw_one(parameter, trial)
    return drawn


def _now(key: str, drawn: Mapping[str, Value], config: RunConfig) -> Any:
    return drawn[key] if key in drawn else config_value(config, key)


def _draw_one(parameter: Parameter, trial: Suggests) -> Value:
    domain, name = parameter.domain, parameter.name
    if isinstance(domain, Choices):
        chosen: Value = trial.suggest_categorical(name, domain.values)
        return chosen
    if domain.is_integer:
        low, high = int(domain.low), int(domain.high)
        return trial.suggest_int(name, low, high, step=domain.step, log=domain.scale == "log")
    if domain.scale == "log_below_one":
        below = trial.suggest_float(name, 1 - domain.high, 1 - domain.low, log=True)
        return _within(1 - _in_four_digits(below), domain)
    drawn = trial.suggest_float(name, domain.low, domain.high, log=domain.scale == "log")
    return _within(_in_four_digits(drawn), domain)


def _in_four_digits(value: float) -> float:
    """The value in four digits, which people can read; no setting needs more."""
    return float(f"{value:.4g}")


def _within(value: float, domain: Range) -> float:
    return min(max(round(value, 15), domain.low), domain.high)


def _read_parameter(entry: object, where: str) -> Parameter:
    if not isinstance(entry, dict):
        raise ConfigError(where, "is not a table", _REMEDY)
    for key in entry:
        if key not in _KEYS:
            known = ", ".join(sorted(_KEYS))
            raise ConfigError(f"{where}: {in_brief(key)}", "no such entry", f"use one of {known}")
    key = entry.get("key")
    if not isinstance(key, str) or key.partition(".")[0] not in SECTIONS:
        problem = f"key is {in_brief(key)}"
        remedy = f"name a setting of {', '.join(SECTIONS)}: a trial may not change its own measure"
        raise ConfigError(where, problem, remedy)
    where = f"{where}, {in_brief(key)}"
    has_choices = "choices" in entry
    domain = _read_choices(entry, key, where) if has_choices else _read_range(entry, where)
    return Parameter(key=key, domain=domain, when=_read_when(entry.get("when", {}), where))


def _read_choices(entry: Mapping[str, Any], key: str, where: str) -> Choices:
    values = entry["choices"]
    if set(entry) - {"key", "choices", "when"}:
        raise ConfigError(where, "has choices and a range", "keep one of the two")
    if not isinstance(values, list) or not 0 < len(values) <= MOST_CHOICES:
        raise ConfigError(where, "choices is no list of values", f"give 1 .. {MOST_CHOICES}")
    checked = tuple(checked_setting(key, value, where) for value in values)
    if len(set(checked)) != len(checked):
        raise ConfigError(where, "has a choice twice", "leave one out")
    return Choices(values=checked)


def _read_range(entry: Mapping[str, Any], where: str) -> Range:
    low, high = (_number(entry, end, where) for end in ("low", "high"))
    scale, of, step = entry.get("scale", "linear"), entry.get("of", "value"), entry.get("step", 1)
    if scale not in _SCALES:
        raise ConfigError(where, f"scale is {in_brief(scale)}", f"use one of {', '.join(_SCALES)}")
    if of not in ("value", "config"):
        raise ConfigError(where, f"of is {in_brief(of)}", "use 'value' or 'config'")
    if type(step) is not int or not 1 <= step < 2**31:
        raise ConfigError(where, f"step is {in_brief(step)}", "give an integer of at least 1")
    is_integer = type(entry["low"]) is int and type(entry["high"]) is int and of == "value"
    domain = Range(
        low=low,
        high=high,
        scale=scale,
        step=step,
        is_integer=is_integer,
        times_config=of == "config",
    )
    _check_range(domain, where)
    return domain


def _check_range(domain: Range, where: str) -> None:
    low, high, scale = domain.low, domain.high, domain.scale
    if not low < high:
        raise ConfigError(where, f"low {low:g} is not below high {high:g}", "mend the range")
    if scale == "log" and low <= 0:
        raise ConfigError(where, f"low is {low:g} on a logarithmic scale", "set it above 0")
    if scale == "log_below_one" and (high >= 1 or low < 0 or domain.is_integer):
        problem = f"is {low:g} .. {high:g} on a scale of numbers below one"
        raise ConfigError(where, problem, "set low to at least 0 and high below 1")
    if scale == "log_below_one" and domain.times_config:
        raise ConfigError(where, "multiplies a number below one", "leave out of = 'config'")
    if domain.step != 1 and (not domain.is_integer or scale != "linear"):
        raise ConfigError(where, "has a step", "steps are for integers on a linear scale")


def _number(entry: Mapping[str, Any], end: str, where: str) -> float:
    value = entry.get(end)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 2**53:
        raise ConfigError(where, f"{end} is {in_brief(value)}", "give a number, or choices")
    return float(value)


def _read_when(when: object, where: str) -> tuple[tuple[str, Value], ...]:
    if not isinstance(when, dict):
        raise ConfigError(where, "when is not a table", 'write when = { "optim.name" = "lamb" }')
    return tuple((key, checked_setting(key, value, where)) for key, value in when.items())


def _check_keys(space: Space, path: Path) -> None:
    seen: dict[str, Parameter] = {}
    for parameter in space:
        other = seen.get(parameter.key)
        if other is not None and not _exclude_each_other(parameter, other):
            problem = "is there twice, and both may hold at once"
            remedy = "give each a `when` with another value of one setting"
            raise ConfigError(f"{path}: {parameter.key}", problem, remedy)
        seen[parameter.key] = parameter


def _exclude_each_other(one: Parameter, other: Parameter) -> bool:
    theirs = dict(other.when)
    return any(key in theirs and theirs[key] != value for key, value in one.when)


def _resolved(parameter: Parameter, config: RunConfig) -> Parameter:
    domain = parameter.domain
    if isinstance(domain, Choices):
        return parameter
    where = f"--space: {parameter.key}"
    if domain.times_config:
        domain = _times(domain, config_value(config, parameter.key), where)
    ends = [int(end) if domain.is_integer else end for end in (domain.low, domain.high)]
    for end in ends:
        checked = checked_setting(parameter.key, end, where)
        if type(checked) is int and not domain.is_integer:
            raise ConfigError(where, f"is an integer, {end:g} is none", "give integers as ends")
        if type(checked) is float and domain.is_integer:  # ends 0 and 1 are not its only values
            domain = replace(domain, is_integer=False)
            _check_range(domain, where)
    return replace(parameter, domain=domain)


def _times(domain: Range, own: object, where: str) -> Range:
    if not isinstance(own, int | float) or isinstance(own, bool) or not 0 < own < 2**53:
        problem = f"is {in_brief(own)} in the config, whose multiples are searched"
        raise ConfigError(where, problem, "set it above 0, or leave out of = 'config'")
    low, high = domain.low * own, domain.high * own
    if isinstance(own, int):
        low, high = float(math.floor(low)), float(math.ceil(high))
    scaled = replace(
        domain, low=low, high=high, is_integer=isinstance(own, int), times_config=False
    )
    _check_range(scaled, where)
    return scaled
