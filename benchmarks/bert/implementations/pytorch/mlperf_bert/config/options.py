"""The options --config and --set of every command that reads a config."""

import argparse
import difflib
import os
from pathlib import Path

from mlperf_bert.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "configs"
FILE_OR_NAME = "TOML file, or the name of one that is shipped"


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
