"""Reader of SPACE.toml: the settings to search, their values and conditions."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from mlperf_bert.config.files import checked_setting, config_value, read_toml
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.errors import ConfigError
from mlperf_bert.files import in_brief

if TYPE_CHECKING:
    from optuna import Trial

Value = bool | int | float | str
Scale = Literal["linear", "log", "log_below_one"]

SECTIONS = ("optim", "schedule", "clip", "parallel", "data", "model")
_SCALES: tuple[Scale, ...] = ("linear", "log", "log_below_one")
_KEYS = {"key", "low", "high", "scale", "of", "choices", "when"}
_REMEDY = "see docs/guides/tune.md for the form"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A setting to search if `when` holds, which gives settings and their values.

    It is one of `choices` or, without any, a number of low .. high, both included; an integer for a
    setting that is one. `scale` "log_below_one" is logarithmic in 1 - x: for betas.
    """

    key: str
    when: tuple[tuple[str, Value], ...]
    choices: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    scale: Scale = "linear"
    is_integer: bool = False

    @property
    def name(self) -> str:
        """A name that differs from other ranges of the setting under other conditions."""
        conditions = ", ".join(f"{key}={value}" for key, value in self.when)
        return f"{self.key} [{conditions}]" if conditions else self.key


Space = tuple[Parameter, ...]


def read_space(path: Path, config: RunConfig) -> Space:
    """The parameters in a file, their ends as numbers for this config.

    Raises ConfigError that names the wrong parameter and its fault.
    """
    tables = read_toml(path, "give a file of [[parameter]] tables, or the name of a shipped space")
    for name in tables:
        if name != "parameter":
            raise ConfigError(f"{path}: {in_brief(name)}", "no such table", "use [[parameter]]")
    entries = tables.get("parameter")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(str(path), "has no list of [[parameter]] tables", _REMEDY)
    return tuple(
        _read_parameter(entry, f"{path}: parameter {number}", config)
        for number, entry in enumerate(entries, 1)
    )


def space_as_json(space: Space) -> list[dict[str, Any]]:
    """The space for a file, in values that JSON keeps unchanged."""
    return [
        {**asdict(each), "choices": list(each.choices), "when": dict(each.when)} for each in space
    ]


def draw(space: Space, trial: "Trial", config: RunConfig) -> dict[str, Value]:
    """Draw settings and their values for one trial, in the order of the space.

    A condition is checked against earlier draws, else against the config. Raises ConfigError if two
    ranges of one setting hold at once.
    """
    drawn: dict[str, Value] = {}
    for parameter in space:
        holds = all(
            (drawn[key] if key in drawn else config_value(config, key)) == value
            for key, value in parameter.when
        )
        if holds and parameter.key in drawn:
            problem = "has two ranges that hold at once"
            remedy = "give each a `when` with another value of one setting"
            raise ConfigError(f"--space: {parameter.key}", problem, remedy)
        if holds:
            drawn[parameter.key] = _draw_one(parameter, trial)
    return drawn


def _draw_one(parameter: Parameter, trial: "Trial") -> Value:
    name, low, high = parameter.name, parameter.low, parameter.high
    is_log = parameter.scale == "log"
    if parameter.choices:
        return cast("Value", trial.suggest_categorical(name, parameter.choices))
    if parameter.is_integer:
        return trial.suggest_int(name, int(low), int(high), log=is_log)
    if parameter.scale == "log_below_one":
        found = 1 - _in_four_digits(trial.suggest_float(name, 1 - high, 1 - low, log=True))
    else:
        found = _in_four_digits(trial.suggest_float(name, low, high, log=is_log))
    return min(max(round(found, 15), low), high)


def _in_four_digits(value: float) -> float:
    """The value in four digits, which people can read; no setting needs more."""
    return float(f"{value:.4g}")


def _read_parameter(entry: object, where: str, config: RunConfig) -> Parameter:
    if not isinstance(entry, dict):
        raise ConfigError(where, "is not a table", _REMEDY)
    for name in entry:
        if name not in _KEYS:
            known = ", ".join(sorted(_KEYS))
            raise ConfigError(f"{where}: {in_brief(name)}", "no such entry", f"use one of {known}")
    key = entry.get("key")
    if not isinstance(key, str) or key.partition(".")[0] not in SECTIONS:
        problem = f"key is {in_brief(key)}"
        remedy = f"name a setting of {', '.join(SECTIONS)}: a trial may not change its own measure"
        raise ConfigError(where, problem, remedy)
    where = f"{where}, {in_brief(key)}"
    when = entry.get("when", {})
    if not isinstance(when, dict):
        raise ConfigError(where, "when is not a table", 'write when = { "optim.name" = "lamb" }')
    conditions = tuple((name, checked_setting(name, value, where)) for name, value in when.items())
    if "choices" not in entry:
        return _read_range(entry, key, conditions, where, config)
    values = entry["choices"]
    if not isinstance(values, list) or not values or set(entry) - {"key", "choices", "when"}:
        raise ConfigError(where, "choices is no list of values alone", "give choices, or a range")
    choices = tuple(checked_setting(key, value, where) for value in values)
    return Parameter(key=key, when=conditions, choices=tuple(dict.fromkeys(choices)))


def _read_range(
    entry: Mapping[str, Any],
    key: str,
    when: tuple[tuple[str, Value], ...],
    where: str,
    config: RunConfig,
) -> Parameter:
    low, high = (_number(entry, end, where) for end in ("low", "high"))
    scale = entry.get("scale", "linear")
    if scale not in _SCALES:
        raise ConfigError(where, f"scale is {in_brief(scale)}", f"use one of {', '.join(_SCALES)}")
    if entry.get("of", "value") == "config":
        own = config_value(config, key)
        if not isinstance(own, int | float) or own <= 0:
            problem = f"is {in_brief(own)} in the config, whose multiples are searched"
            raise ConfigError(where, problem, "set it above 0, or leave out of = 'config'")
        low, high = low * own, high * own
        if isinstance(own, int):
            low, high = float(math.floor(low)), float(math.ceil(high))
    ends = [int(end) if end.is_integer() else end for end in (low, high)]
    is_integer = all(type(checked_setting(key, end, where)) is int for end in ends)
    _check_range(low, high, scale, where, is_integer=is_integer)
    return Parameter(key=key, when=when, low=low, high=high, scale=scale, is_integer=is_integer)


def _check_range(low: float, high: float, scale: Scale, where: str, *, is_integer: bool) -> None:
    if not low < high:
        raise ConfigError(where, f"low {low:g} is not below high {high:g}", "mend the range")
    if scale == "log" and low <= 0:
        raise ConfigError(where, f"low is {low:g} on a logarithmic scale", "set it above 0")
    if scale == "log_below_one" and (high >= 1 or is_integer):
        problem = f"is {low:g} .. {high:g} on a scale of numbers below one"
        raise ConfigError(where, problem, "set high below 1")


def _number(entry: Mapping[str, Any], end: str, where: str) -> float:
    value = entry.get(end)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 2**53:
        raise ConfigError(where, f"{end} is {in_brief(value)}", "give a number, or choices")
    return float(value)
