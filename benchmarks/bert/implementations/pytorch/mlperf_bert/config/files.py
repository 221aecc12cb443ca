"""Reading and writing of configs: TOML and `--set section.field=value` to a RunConfig and back.

The options of the command line that name a config, `--config`, `--set` and `--init-checkpoint`, are
here too.

Reading is strict: an unknown section or field, a missing one or a wrong type is a ConfigError that
names the field. A file named `[<recipe>_]<system>_<nodes>x<ranks>x<batch>x<accum>.toml` must hold
that size.
"""

import argparse
import dataclasses
import difflib
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ParallelSection, bounds_of
from mlperf_bert.errors import ConfigError
from mlperf_bert.files import in_brief, read_regular_file

SHIPPED = Path(__file__).parents[1] / "configs"
FILE_OR_NAME = "TOML file, or the name of one that is shipped"
Tables = dict[str, dict[str, Any]]

_MAX_BYTES = 64 * 2**10  # a complete config has 4 kB
_KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
}
# Settings of earlier versions, which files of old runs and checkpoints still name, and the values
# that mean what the program does now; None: the setting changed no result.
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
    "optim.initial_loss_scale": None,  # only precision "fp16", which is gone, scaled the loss
    "optim.loss_scale_growth_steps": None,
    "optim.momentum": (0.95,),
    "schedule.power": (1.0,),
    "clip.accumulation": ("accumulated",),
    "clip.bucket_count": (22,),
    "checkpoint.save": ("end", "never"),
}
_SIZE_IN_NAME = re.compile(r"_(\d+)x(\d+)x(\d+)x(\d+)$")


def add_config(
    parser: argparse.ArgumentParser, text: str = FILE_OR_NAME, *, required: bool = True
) -> None:
    """Add `--config FILE` (a Path, or None if not given) and `--set`."""
    parser.add_argument("--config", type=find_config, required=required, metavar="FILE", help=text)
    add_set(parser)


def add_set(parser: argparse.ArgumentParser) -> None:
    """Add `--set SECTION.KEY=VALUE`; `args.set` is the list of all, as `load_config` takes it."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting"
    )


def add_init_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add `--init-checkpoint DIR`, a Path or None, as `load_config` takes it."""
    text = "begin with these weights, not with those of run.init_checkpoint"
    parser.add_argument("--init-checkpoint", type=Path, metavar="DIR", help=text)


def find_config(text: str) -> Path:
    """The config file for `text`: a path, or the name of a shipped config, such as `cpu_tiny`.

    Raises ConfigError for an unknown name; it does not check that a path has a file.
    """
    path = Path(text)
    if path.suffix or path.name != text or os.path.exists(text):
        return path
    names = sorted(each.stem for each in SHIPPED.glob("*.toml"))
    if text in names:
        return SHIPPED / f"{text}.toml"
    near = difflib.get_close_matches(text, names)
    remedy = f"did you mean {' or '.join(near)}?" if near else f"those are in {SHIPPED}"
    raise ConfigError(text, "is neither a file nor the name of a shipped config", remedy)


def load_config(
    path: Path, overrides: Sequence[str] = (), init_checkpoint: Path | None = None
) -> RunConfig:
    """Read a TOML file and apply overrides such as `optim.learning_rate=1e-3`.

    `init_checkpoint` overrides `run.init_checkpoint`, whatever characters are in its path.
    """
    tables = read_toml(path)
    changes = [_parse_override(override) for override in overrides]
    if init_checkpoint is not None:
        changes.append(("run", "init_checkpoint", str(init_checkpoint)))
    config = config_from_tables(tables, str(path))
    check_file_name(path, config.parallel)
    for section, field, value in changes:
        tables.setdefault(section, {})[field] = value
    return config_from_tables(tables, "--set") if changes else config


def config_from_tables(tables: Mapping[str, Any], origin: str) -> RunConfig:
    """Build the config from nested dictionaries; `origin` opens every error message."""
    sections = _hints(RunConfig)
    for name in tables:
        if name not in sections:
            known = ", ".join(sections)
            raise ConfigError(f"{origin}: [{name}]", "no such section", f"use one of {known}")
    built = {}
    for name, kind in sections.items():
        table = tables.get(name, {})
        if not isinstance(table, Mapping):
            raise ConfigError(f"{origin}: {name}", "is not a table", f"write it as [{name}]")
        built[name] = _build_section(kind, name, table, origin)
    return RunConfig(**built)


def config_to_toml(config: RunConfig) -> str:
    """The complete config, defaults written out, as TOML that `load_config` reads back equal."""
    return tables_to_toml(config_to_tables(config))


def tables_to_toml(tables: Tables) -> str:
    """Sections and their settings as TOML."""
    lines = []
    for section, table in tables.items():
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
            raise ConfigError(
                dotted, "no such setting", "see `mlperf_bert config show FILE` for all"
            )
        value = getattr(value, name)
    return value


def checked_setting(dotted: str, value: Any, origin: str) -> Any:
    """The value converted for the setting `section.field`. Raises ConfigError if it is unfit."""
    section, _, field = dotted.partition(".")
    kind = _hints(RunConfig).get(section, object)
    hints = _hints(kind)
    if field not in hints:
        remedy = "see `mlperf_bert config show FILE` for all"
        raise ConfigError(f"{origin}: {in_brief(dotted)}", "no such setting", remedy)
    checked = _checked(value, hints[field], f"{origin}: {dotted}")
    bounds = bounds_of(kind).get(field)
    if bounds is not None and not isinstance(checked, str):
        bounds.check(f"{origin}: {dotted}", checked)
    return checked


def read_toml(path: Path, remedy: str = "give a config file") -> dict[str, Any]:
    """The tables of a small TOML file. Raises ConfigError if it is none."""
    try:
        text = read_regular_file(path, _MAX_BYTES).decode(
            "utf-8-sig"
        )  # an editor may have put a mark first
    except OSError as error:
        raise ConfigError(str(path), error.strerror or "unreadable", remedy) from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), "is not UTF-8 text", "give a TOML file") from None
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(str(path), f"is not TOML ({error})", "mend that line") from None


def _build_section(kind: type, name: str, table: Mapping[str, Any], origin: str) -> Any:
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if name == "checkpoint" and table.get("save") == "never":
        table = {**table, "interval_steps": "never"}  # which says now what `save` said
    for key, value in table.items():
        if key not in fields:
            still = _GONE.get(f"{name}.{key}", ())
            if key == "dupe_factor" and table.get("masking") == "dynamic":
                still = (1,)  # as DataSection.dupe_factor says
            if still is None or value in still:
                continue
            known = ", ".join(fields)
            raise ConfigError(f"{origin}: {name}.{key}", "no such setting", f"use one of {known}")
    values = {}
    for key, field in fields.items():
        if key in table:
            values[key] = _checked(table[key], hints[key], f"{origin}: {name}.{key}")
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{origin}: {name}.{key}", "is missing", "add it")
    return kind(**values)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _checked(value: Any, hint: Any, where: str) -> Any:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    options = typing.get_args(hint) if union else (hint,)
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            if isinstance(value, str) and value in typing.get_args(option):
                return value
        elif type(value) is option:
            if isinstance(value, str) and not value.isprintable():
                raise ConfigError(where, f"is {in_brief(value)}", "give printable characters")
            return value
        elif option is float and type(value) is int:
            with suppress(OverflowError):
                return float(value)
    raise ConfigError(where, f"is {in_brief(value)}", f"give {_describe(options)}")


def _describe(options: Sequence[Any]) -> str:
    words = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            words += [repr(word) for word in typing.get_args(option)]
        else:
            words.append(_KINDS[option])
    return " or ".join(words)


def _parse_override(override: str) -> tuple[str, str, Any]:
    dotted, equals, text = override.partition("=")
    section, dot, field = dotted.strip().partition(".")
    if not (equals and dot and section and field):
        raise ConfigError("--set", f"cannot read {in_brief(override)}", "write section.field=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        value = text.strip()  # a bare word is a string
    return section, field, value


def check_file_name(path: Path, parallel: ParallelSection) -> None:
    """Raise ConfigError if a file's name states another size than its section [parallel]."""
    match = _SIZE_IN_NAME.search(path.stem)
    if match is None:
        return
    names = ("nodes", "ranks_per_node", "local_batch_size", "grad_accum_steps")
    size = [getattr(parallel, name) for name in names]
    if [int(number) for number in match.groups()] != size:
        problem = f"[parallel] says {'x'.join(map(str, size))}"
        raise ConfigError(str(path), problem, "rename the file or mend [parallel]")


def _to_toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # TOML has no surrogate pairs
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
