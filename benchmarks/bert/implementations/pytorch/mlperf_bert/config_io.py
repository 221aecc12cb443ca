"""TOML and `--set section.field=value` to a RunConfig, and back.

Strict: an unknown section or field, a missing one or a wrong type is a ConfigError that names the
field. A file named `[<recipe>_]<system>_<nodes>x<ranks>x<batch>x<accum>.toml` must hold that size.
"""

import dataclasses
import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlperf_bert.config import RunConfig
from mlperf_bert.errors import ConfigError

Tables = dict[str, dict[str, Any]]

_SIZE_IN_NAME = re.compile(r"_(\d+)x(\d+)x(\d+)x(\d+)$")


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file and apply overrides such as `optim.learning_rate=1e-3`."""
    tables = _read_tables(path)
    from_file = config_from_tables(tables, str(path))
    _check_file_name(path, from_file)
    if not overrides:
        return from_file
    for override in overrides:
        section, field, value = _parse_override(override)
        tables.setdefault(section, {})[field] = value
    return config_from_tables(tables, "--set")


def config_from_tables(tables: Mapping[str, Any], origin: str) -> RunConfig:
    """Build the config from nested dictionaries; `origin` opens every error message."""
    sections = {field.name: field for field in dataclasses.fields(RunConfig)}
    for name in tables:
        if name not in sections:
            known = ", ".join(sections)
            raise ConfigError(f"{origin}: [{name}]", "no such section", f"use one of {known}")
    built = {}
    for name, field in sections.items():
        table = tables.get(name, {})
        if not isinstance(table, Mapping):
            raise ConfigError(f"{origin}: {name}", "is not a table", f"write it as [{name}]")
        built[name] = _build_section(typing.cast(type, field.type), name, table, origin)
    return RunConfig(**built)


def config_to_toml(config: RunConfig) -> str:
    """The complete config, defaults written out, as TOML that `load_config` reads back equal."""
    lines = []
    for section, table in config_to_tables(config).items():
        lines.append(f"[{section}]")
        lines += [f"{field} = {_to_toml(value)}" for field, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def config_to_tables(config: RunConfig) -> Tables:
    """The complete config as nested dictionaries, ready for TOML or JSON."""
    return dataclasses.asdict(config)


def config_value(config: RunConfig, dotted: str) -> Any:
    """The value of `section.field`, derived properties included."""
    value: Any = config
    for name in dotted.split("."):
        if name.startswith("_") or not hasattr(value, name):
            raise ConfigError(dotted, "no such setting", "see `mlperf_bert config FILE` for all")
        value = getattr(value, name)
    return value


def _read_tables(path: Path) -> Tables:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "unreadable", "give a config file") from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "is not UTF-8 text", "give a TOML file") from None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(str(path), f"is not TOML ({error})", "mend that line") from None


def _build_section(kind: type, name: str, table: Mapping[str, Any], origin: str) -> Any:
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in table:
        if key not in fields:
            known = ", ".join(fields)
            raise ConfigError(f"{origin}: {name}.{key}", "no such setting", f"use one of {known}")
    values = {}
    for key, field in fields.items():
        if key in table:
            values[key] = _checked(table[key], hints[key], f"{origin}: {name}.{key}")
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{origin}: {name}.{key}", "is missing", "add it")
    return kind(**values)


def _checked(value: Any, hint: Any, where: str) -> Any:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    options = typing.get_args(hint) if union else (hint,)
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            if isinstance(value, str) and value in typing.get_args(option):
                return value
        elif option is float and type(value) in (int, float):
            return float(value)
        elif type(value) is option:
            return value
    raise ConfigError(where, f"is {value!r}", f"give {_describe(options)}")


def _describe(options: Sequence[Any]) -> str:
    words = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            words += [repr(word) for word in typing.get_args(option)]
        else:
            names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
            words.append(names[option])
    return " or ".join(words)


def _parse_override(override: str) -> tuple[str, str, Any]:
    dotted, equals, text = override.partition("=")
    section, dot, field = dotted.strip().partition(".")
    if not (equals and dot and section and field):
        raise ConfigError("--set", f"cannot read {override!r}", "write section.field=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    return section, field, value


def _check_file_name(path: Path, config: RunConfig) -> None:
    match = _SIZE_IN_NAME.search(path.stem)
    if match is None:
        return
    parallel = config.parallel
    size = (
        parallel.nodes,
        parallel.ranks_per_node,
        parallel.local_batch_size,
        parallel.grad_accum_steps,
    )
    if tuple(int(number) for number in match.groups()) != size:
        inside = "x".join(str(number) for number in size)
        problem = f"[parallel] says {inside}"
        raise ConfigError(str(path), problem, "rename the file or mend [parallel]")


def _to_toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
