"""The sub-command `config`, which lists all settings, and checks or prints a config."""

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from mlperf_bert.arguments import add_command
from mlperf_bert.config.files import (
    FILE_OR_NAME,
    add_init_checkpoint,
    add_set,
    config_to_toml,
    config_value,
    find_config,
    load_config,
    to_toml,
)
from mlperf_bert.config.settings import Setting, all_settings, sections, unknown_setting

_WIDTH = 80  # columns, if stdout is not a terminal
_COMMANDS = (
    (
        "show",
        "print a complete config, to start your own from",
        "Check a config and print it with all settings, defaults included. The output is a config "
        "file, so you can save it, edit it and train with it.",
        "show cpu_tiny > my.toml",
    ),
    (
        "get",
        "print single values of a config",
        "Print the values of some settings of a config, one per line.",
        "get cpu_tiny optim.learning_rate parallel.global_batch_size",
    ),
    (
        "validate",
        "check that a run can start with a config",
        "Check that a run can start with this config, this data and these initial weights. Print "
        "nothing if it can. Otherwise print an error and exit with status 2.",
        "validate cpu_tiny --data my_data",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `config` to its parser."""
    parser.description = "List all settings, and check or print a config."
    commands = parser.add_subparsers(dest="question", required=True, metavar="COMMAND")
    listed = add_command(
        commands,
        "list",
        "list all settings with their defaults and meanings",
        "List the settings that config files and --set accept, with their defaults, allowed values "
        "and meanings. Without NAME, the command lists all settings.",
        "mlperf_bert config list optim",
        "mlperf_bert config list learning_rate",
    )
    text = "section or setting to list, such as optim or optim.learning_rate"
    listed.add_argument("names", nargs="*", metavar="NAME", help=text)
    for name, text, description, example in _COMMANDS:
        command = add_command(commands, name, text, description, f"mlperf_bert config {example}")
        command.add_argument("config", type=find_config, metavar="FILE", help=FILE_OR_NAME)
        if name == "get":
            text = "setting to print, or derived value such as parallel.global_batch_size"
            command.add_argument("keys", nargs="+", metavar="SECTION.KEY", help=text)
        if name == "validate":
            text = "directory with the prepared sets train/ and eval/"
            command.add_argument("--data", type=Path, required=True, metavar="DIR", help=text)
        add_set(command)
        add_init_checkpoint(command)


def run(args: argparse.Namespace) -> int:
    """Run a sub-command of `config`, and return exit status 0. Raises ConfigError."""
    if args.question == "list":
        print("\n".join(_listed(args.names)))
        return 0
    config = load_config(args.config, args.set, args.init_checkpoint)
    if args.question == "validate":
        from mlperf_bert.checkpoint.first_weights import check_first_weights
        from mlperf_bert.data.set_checks import open_data

        check_first_weights(config, args.data)
        open_data(config, args.data, checks_files=True)
    elif args.question == "get":
        print(*(config_value(config, key) for key in args.keys), sep="\n")
    else:
        print(config_to_toml(config), end="")
    return 0


def _listed(names: Sequence[str]) -> Iterator[str]:
    """Yield the lines that `config list` prints for the named sections and settings.

    Without names, yield the lines of all settings. Raises ConfigError for an unknown name, and
    suggests similar names.
    """
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    indent = " " * 6
    section = ""
    for setting in _chosen(names):
        if setting.section != section:
            section = setting.section
            yield f"[{section}]"
        default = "(required)" if setting.is_required else to_toml(setting.default)
        yield f"  {setting.field} = {default}"
        for text in (setting.meaning, f"Allowed: {setting.allowed}"):
            yield from textwrap.wrap(
                text, max(width, 40), initial_indent=indent, subsequent_indent=indent
            )


def _chosen(names: Sequence[str]) -> list[Setting]:
    """Return the settings whose section, field or full name is in `names`.

    Without names, return all settings.
    """
    settings = list(all_settings().values())
    for name in names:
        if not any(name in (each.section, each.field, each.name) for each in settings):
            raise unknown_setting(name, "config list", tuple(sections()))
    return [
        each for each in settings if not names or {each.section, each.field, each.name} & {*names}
    ]
