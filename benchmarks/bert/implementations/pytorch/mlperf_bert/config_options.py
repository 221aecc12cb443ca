"""The options --config and --set, for every command that reads a config."""

import argparse
from pathlib import Path


def add_config(
    parser: argparse.ArgumentParser, text: str = "TOML file", *, required: bool = True
) -> None:
    """Add `--config FILE` (a Path, or None where it is not given) and `--set`."""
    parser.add_argument("--config", type=Path, required=required, metavar="FILE", help=text)
    add_set(parser)


def add_set(parser: argparse.ArgumentParser) -> None:
    """Add `--set SECTION.KEY=VALUE`; `args.set` is the list of all, as `load_config` takes it."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting"
    )
