"""Reads search spaces and draws values from them.

A space is a TOML file that lists the settings to search, with their possible values and conditions.
"""

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
_REMEDY = "see docs/guides/tune.md for the format"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A setting to search, with its possible values.

    Attributes:
        key: the setting's name, such as "optim.learning_rate".
        when: other settings and the values that they must have. If one of them has another value,
            this parameter is not searched.
        choices: the possible values. If empty, the value is a number from `low` to `high`.
        low, high: the ends of the range, both included.
        scale: how values are distributed over the range. "log_below_one" is logarithmic in 1 - x,
            which suits Adam's betas.
        is_integer: whether the setting is an integer.
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
        """Return the parameter's name in Optuna's study, made unique by its conditions."""
        conditions = ", ".join(f"{key}={value}" for key, value in self.when)
        return f"{self.key} [{conditions}]" if conditions else self.key


Space = tuple[Parameter, ...]


def read_space(path: Path, config: RunConfig) -> Space:
    """Read the parameters of a space from a TOML file.

    Values that are given as multiples of the config's values are converted to numbers. Raises
    ConfigError if a parameter is invalid. The message names the parameter and the problem.
    """
    tables = read_toml(path, "pass a file of [[parameter]] tables, or the name of a shipped space")
    for name in tables:
        if name != "parameter":
            raise ConfigError(f"{path}: {in_brief(name)}", "unknown table", "use [[parameter]]")
    entries = tables.get("parameter")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(str(path), "contains no [[parameter]] tables", _REMEDY)
    space: list[Parameter] = []
    for number, entry in enumerate(entries, 1):
        where = f"{path}: parameter {number}"
        parameter = _read_parameter(entry, where, config)
        for key, value in parameter.when:
            if config_value(config, key) != value and key not in {each.key for each in space}:
                problem = f"is never searched, because {key} is never {in_brief(value)}"
                raise ConfigError(where, problem, f"search {key} before it, or change the config")
        space.append(parameter)
    return tuple(space)


def space_as_json(space: Space) -> list[dict[str, Any]]:
    """Convert a space to values that can be written to JSON and read back unchanged."""
    return [
        {**asdict(each), "choices": list(each.choices), "when": dict(each.when)} for each in space
    ]


def draw(space: Space, trial: "Trial", config: RunConfig) -> dict[str, Value]:
    """Draw the values of one trial in the order of the space, and return them by setting.

    A condition is checked against the values that were drawn before. If a setting was not drawn,
    its value in the config is used. Raises ConfigError if the conditions of two ranges of the same
    setting hold at the same time.
    """
    drawn: dict[str, Value] = {}
    for parameter in space:
        holds = all(
            (drawn[key] if key in drawn else config_value(config, key)) == value
            for key, value in parameter.when
        )
        if holds and parameter.key in drawn:
            problem = "has two ranges whose conditions hold at the same time"
            remedy = "add a `when` to each range, with different values of the same setting"
            raise ConfigError(f"--space: {parameter.key}", problem, remedy)
        if holds:
            drawn[parameter.key] = _draw_one(parameter, trial)
    return drawn


def _draw_one(parameter: Parameter, trial: "Trial") -> Value:
    """Draw a parameter's value, rounded to four significant digits if it is a real number."""
    name, low, high = parameter.name, parameter.low, parameter.high
    is_log = parameter.scale == "log"
    if parameter.choices:
        return cast("Value", trial.suggest_categorical(name, parameter.choices))
    if parameter.is_integer:
        return trial.suggest_int(name, int(low), int(high), log=is_log)
    if parameter.scale == "log_below_one":
        value = 1 - _rounded(trial.suggest_float(name, 1 - high, 1 - low, log=True))
    else:
        value = _rounded(trial.suggest_float(name, low, high, log=is_log))
    return min(max(round(value, 15), low), high)


def _rounded(value: float) -> float:
    """Round a value to four significant digits, so that people can read and copy it."""
    return float(f"{value:.4g}")


def _read_parameter(entry: object, where: str, config: RunConfig) -> Parameter:
    """Check a [[parameter]] table and return the parameter. Raises ConfigError if it is invalid."""
    if not isinstance(entry, dict):
        raise ConfigError(where, "is not a table", _REMEDY)
    for name in entry:
        if name not in _KEYS:
            known = ", ".join(sorted(_KEYS))
            raise ConfigError(f"{where}: {in_brief(name)}", "unknown key", f"use one of {known}")
    key = entry.get("key")
    if not isinstance(key, str) or key.partition(".")[0] not in SECTIONS:
        problem = f"key is {in_brief(key)}"
        remedy = f"use a setting of {', '.join(SECTIONS)}, because others change what is measured"
        raise ConfigError(where, problem, remedy)
    where = f"{where}, {in_brief(key)}"
    when = entry.get("when", {})
    if not isinstance(when, dict):
        raise ConfigError(where, "`when` is not a table", 'write when = { "optim.name" = "lamb" }')
    conditions = tuple((name, checked_setting(name, value, where)) for name, value in when.items())
    if "choices" not in entry:
        return _read_range(entry, key, conditions, where, config)
    values = entry["choices"]
    if not isinstance(values, list) or not values or set(entry) - {"key", "choices", "when"}:
        remedy = "use either `choices = [...]`, or `low` and `high`"
        raise ConfigError(
            where, "`choices` must be a list, and cannot be combined with a range", remedy
        )
    choices = tuple(checked_setting(key, value, where) for value in values)
    return Parameter(key=key, when=conditions, choices=tuple(dict.fromkeys(choices)))


def _read_range(
    entry: Mapping[str, Any],
    key: str,
    when: tuple[tuple[str, Value], ...],
    where: str,
    config: RunConfig,
) -> Parameter:
    """Check a [[parameter]] table with `low` and `high` and return the parameter.

    Raises ConfigError.
    """
    low, high = (_number(entry, end, where) for end in ("low", "high"))
    scale = entry.get("scale", "linear")
    if scale not in _SCALES:
        raise ConfigError(
            where, f"unknown scale {in_brief(scale)}", f"use one of {', '.join(_SCALES)}"
        )
    of = entry.get("of", "value")
    if of not in ("value", "config"):
        raise ConfigError(where, f"unknown of = {in_brief(of)}", "use 'config', or remove it")
    if of == "config":
        own = config_value(config, key)
        if not isinstance(own, int | float) or own <= 0:
            problem = f"is {in_brief(own)} in the config, so its multiples cannot be searched"
            raise ConfigError(where, problem, "set it above 0, or remove of = 'config'")
        low, high = low * own, high * own
        if isinstance(own, int):
            low, high = float(math.floor(low)), float(math.ceil(high))
    ends = [int(end) if end.is_integer() else end for end in (low, high)]
    is_integer = all(type(checked_setting(key, end, where)) is int for end in ends)
    _check_range(low, high, scale, where, is_integer=is_integer)
    return Parameter(key=key, when=when, low=low, high=high, scale=scale, is_integer=is_integer)


def _check_range(low: float, high: float, scale: Scale, where: str, *, is_integer: bool) -> None:
    """Raise ConfigError if a range is empty or contains values that its scale does not allow."""
    if not low < high:
        problem = f"low is {low:g}, which is not below high ({high:g})"
        raise ConfigError(where, problem, "set `low` below `high`")
    if scale == "log" and low <= 0:
        problem = f"low is {low:g}, which a logarithmic scale does not allow"
        raise ConfigError(where, problem, "set `low` above 0")
    if scale == "log_below_one" and (high >= 1 or is_integer):
        problem = f"ranges from {low:g} to {high:g}, but log_below_one needs real numbers below 1"
        raise ConfigError(where, problem, "set `high` below 1, or use another scale")


def _number(entry: Mapping[str, Any], end: str, where: str) -> float:
    """Return an end of a parameter's range, whose key `end` is "low" or "high".

    Raises ConfigError if it is not a number.
    """
    value = entry.get(end)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 2**53:
        problem = f"{end} must be a number, not {in_brief(value)}"
        raise ConfigError(where, problem, "set low and high to numbers, or use choices")
    return float(value)
