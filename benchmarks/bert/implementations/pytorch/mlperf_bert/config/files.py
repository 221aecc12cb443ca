"""Read and write configs, which are TOML files and overrides `--set section.field=value`.

This module also adds the command-line options that specify a config, which are `--config`, `--set`
and `--init-checkpoint`.

Reading is strict. An unknown section or setting, a missing setting, or a value of a wrong type
raises a ConfigError that names the setting.
"""

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlperf_bert.arguments import Options
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.settings import all_settings, find_setting, sections, unknown_setting
from mlperf_bert.errors import ConfigError
from mlperf_bert.files import in_brief, read_regular_file
from mlperf_bert.suggestions import did_you_mean

SHIPPED = Path(__file__).parents[1] / "configs"
FILE_OR_NAME = "TOML file, or the name of a shipped config"
Tables = dict[str, dict[str, Any]]

_MAX_BYTES = 64 * 2**10  # a complete config has 4 kB
# Settings of earlier versions, which the configs of old runs and checkpoints still have. Each maps
# to the values that mean what the program does today, or to None if it never changed a result.
_GONE: dict[str, tuple[Any, ...] | None] = {
    "run.straggler_factor": None,
    "run.noise_interval_steps": None,
    "run.init_checkpoint_sha256": ("",),
    "parallel.binding": None,
    "model.head": ("full",),
    "model.type_vocab_size": (2,),
    "eval.overlap": ("none",),
    "eval.tokens_per_forward": None,
    "data.quantiles": ("auto",),
    "data.deal": ("snake",),
    "data.balance_model": ("tokens",),
    "data.cost_a": None,
    "data.cost_b": None,
    "data.exchange_window_steps": None,
    "data.dupe_factor": (10,),
    "optim.initial_loss_scale": None,  # only the removed precision "fp16" scaled the loss
    "optim.loss_scale_growth_steps": None,
    "optim.momentum": (0.95,),
    "schedule.power": (1.0,),
    "clip.accumulation": ("accumulated",),
    "clip.bucket_count": (22,),
    "checkpoint.save": ("end", "never"),
}


def add_config(options: Options, text: str = FILE_OR_NAME, *, required: bool = True) -> None:
    """Add the options `--config FILE` and `--set`.

    `args.config` is a Path, or None if the option is not required and was not passed.
    """
    options.add_argument("--config", type=find_config, required=required, metavar="FILE", help=text)
    add_set(options)


def add_set(options: Options) -> None:
    """Add the option `--set SECTION.KEY=VALUE`.

    `args.set` is the list of overrides that `load_config` expects.
    """
    text = "override a setting that `config list` shows (can be repeated)"
    options.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text
    )


def add_init_checkpoint(
    options: Options, text: str = "start from the weights in this checkpoint"
) -> None:
    """Add the option `--init-checkpoint DIR`, with the help text `text`.

    `args.init_checkpoint` is a Path or None, as `load_config` expects.
    """
    text += " (default: run.init_checkpoint of the config)"
    options.add_argument("--init-checkpoint", type=Path, metavar="DIR", help=text)


def find_config(text: str) -> Path:
    """Return the path of a config, given that path or the name of a shipped config.

    A shipped config has a name like `cpu_tiny`. Raises ConfigError for an unknown name. The
    function does not check that a path leads to a file.
    """
    path = Path(text)
    if path.suffix or path.name != text or os.path.exists(text):
        return path
    if (shipped := SHIPPED / f"{text}.toml").exists():
        return shipped
    remedy = _similar_configs(path) or f"the shipped configs are in {SHIPPED}"
    raise ConfigError(text, "no such file or shipped config", remedy)


def _similar_configs(path: Path) -> str:
    """Return "did you mean NAME?" with similar configs, or "" if there are none.

    The names are those of shipped configs and of files next to `path`.
    """
    names = {each.stem: each.stem for each in sorted(SHIPPED.glob("*.toml"))}
    names |= {each.stem: str(each) for each in sorted(path.parent.glob("*.toml"))}
    return did_you_mean(path.stem, names, shown=names)


def load_config(
    path: Path, overrides: Sequence[str] = (), init_checkpoint: Path | None = None
) -> RunConfig:
    """Read a config from a TOML file, and apply overrides such as `optim.learning_rate=1e-3`.

    `init_checkpoint` overrides `run.init_checkpoint`. Its path may contain any characters. Raises
    ConfigError if the config is missing or invalid.
    """
    similar = "" if os.path.lexists(path) else _similar_configs(path)
    tables = read_toml(path, similar or "pass a config file")
    changes = [parse_override(override) for override in overrides]
    if init_checkpoint is not None:
        changes.append(("run", "init_checkpoint", str(init_checkpoint)))
    config = config_from_tables(tables, str(path))
    for section, field, value in changes:
        tables.setdefault(section, {})[field] = value
    return config_from_tables(tables, "--set") if changes else config


def config_from_tables(tables: Mapping[str, Any], origin: str) -> RunConfig:
    """Build a config from nested dictionaries. Errors name `origin` as the source of the values.

    The function reports unknown names before missing ones, because a mistyped name causes both
    errors. Raises ConfigError.
    """
    known = {section: _known(section, tables, origin) for section in sections()}
    for name in tables:
        if name not in sections():
            raise _unknown_section(name, tables[name], origin)
    for name, setting in all_settings().items():
        if setting.is_required and setting.field not in known[setting.section]:
            problem, remedy = f"{name} is missing", f"add it below [{setting.section}]"
            raise ConfigError(origin, problem, remedy)
    built: dict[str, Any] = {}
    for section, kind in sections().items():
        values = known[section].items()
        built[section] = kind(
            **{
                key: find_setting(f"{section}.{key}", origin).check(value, origin)
                for key, value in values
            }
        )
    return RunConfig(**built)


def config_to_toml(config: RunConfig) -> str:
    """Return the complete config, including defaults, as TOML text that `load_config` can read."""
    return tables_to_toml(config_to_tables(config))


def tables_to_toml(tables: Tables) -> str:
    """Return nested dictionaries of sections and their settings as TOML text."""
    lines = []
    for section, table in tables.items():
        lines.append(f"[{section}]")
        lines += [f"{field} = {to_toml(value)}" for field, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def config_to_tables(config: RunConfig) -> Tables:
    """Return the complete config as nested dictionaries, which can be written as TOML or JSON."""
    return dataclasses.asdict(config)


def config_value(config: RunConfig, dotted: str) -> Any:
    """Return the value of a setting `section.field`, or of a property derived from settings.

    Raises ConfigError for an unknown name, and suggests similar names.
    """
    value: Any = config
    for name in dotted.split("."):
        if name.startswith("_") or not hasattr(value, name):
            derived = [
                f"{section}.{each}"
                for section, kind in sections().items()
                for each, found in vars(kind).items()
                if isinstance(found, property)
            ]
            raise unknown_setting(dotted, "config", derived)
        value = getattr(value, name)
    return value


def checked_setting(dotted: str, value: Any, origin: str) -> Any:
    """Return `value` converted to the type of the setting `dotted`. Raises ConfigError.

    The error names `origin` as the source of the value.
    """
    return find_setting(dotted, origin).check(value, origin)


def read_toml(path: Path, remedy: str = "pass a config file") -> dict[str, Any]:
    """Return the tables of a small TOML file. Raises ConfigError if the file cannot be read."""
    try:
        # Some editors begin a file with a byte order mark, which utf-8-sig drops.
        text = read_regular_file(path, _MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "cannot be read", remedy) from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "is not UTF-8 text", "pass a TOML file") from None
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(str(path), f"is not valid TOML ({error})", "fix that line") from None


def _known(section: str, tables: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the settings of a section, without those that only earlier versions had.

    An old setting is dropped if it would not change the run. Raises ConfigError for an unknown
    setting.
    """
    table = tables.get(section, {})
    if not isinstance(table, Mapping):
        raise ConfigError(origin, f"{section} is not a table", f"write it as [{section}]")
    if section == "checkpoint" and table.get("save") == "never":
        table = {**table, "interval_steps": "never"}  # the setting that replaced `save`
    known = {}
    for key, value in table.items():
        name = f"{section}.{key}"
        if name in all_settings():
            known[key] = value
            continue
        unchanged = _GONE.get(name, ())
        if name == "data.dupe_factor" and table.get("masking") == "dynamic":
            unchanged = (1,)  # as DataSection.dupe_factor says
        if unchanged is not None and value not in unchanged:
            raise unknown_setting(name, origin)
    return known


def _unknown_section(name: str, value: Any, origin: str) -> ConfigError:
    if not isinstance(value, Mapping):  # a setting above the first section
        return unknown_setting(name, origin)
    remedy = did_you_mean(name, sections(), f"use one of {', '.join(sections())}")
    return ConfigError(origin, f"unknown section [{in_brief(name)[1:-1]}]", remedy)


def parse_override(override: str) -> tuple[str, str, Any]:
    """Split `section.field=value` into section, field and value. Raises ConfigError."""
    dotted, equals, text = override.partition("=")
    section, dot, field = dotted.strip().partition(".")
    if not equals:
        problem = f"cannot read {in_brief(override)}"
        raise ConfigError("--set", problem, "use the form SECTION.KEY=VALUE")
    if not (dot and field) or section not in sections():
        raise unknown_setting(dotted.strip(), "--set")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        value = text.strip()  # a bare word is a string
    return section, field, value


def to_toml(value: Any) -> str:
    """Return the value of a setting as TOML text."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # TOML has no surrogate pairs
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
