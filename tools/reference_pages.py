"""Print a generated part of docs/reference with `python tools/reference_pages.py PART`.

PART is `settings` for the settings of a config, or `commands` for the commands and their options.
tools/docs_tables.py runs this script and inserts the output into the pages.
"""

import argparse
import sys
import tomllib
from collections.abc import Iterator

from mlperf_bert.__main__ import COMMANDS, VARIANTS, make_parser
from mlperf_bert.arguments import help_of
from mlperf_bert.config.files import SHIPPED, to_toml
from mlperf_bert.config.settings import Setting, all_settings, sections

MOST_NAMED = 2  # a cell names up to this many configs, and otherwise only counts them


def main() -> int:
    """Print the part of the reference that the command line selects, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("settings", "commands"), help="what to print")
    make = settings if parser.parse_args().part == "settings" else commands
    print("\n".join(make()))
    return 0


def settings() -> Iterator[str]:
    """Yield the lines of the settings page, with a heading and a table per config section."""
    changed = _changed_by()
    for section, kind in sections().items():
        yield f"## [{section}]"
        yield ""
        yield (kind.__doc__ or "").partition("\n")[0]
        yield ""
        yield "| Setting | Default | Allowed | Meaning | Shipped configs that change it |"
        yield "|---|---|---|---|---|"
        for setting in all_settings().values():
            if setting.section == section:
                default = "**required**" if setting.is_required else _code(setting.default)
                cells = [f"`{setting.field}`", default, setting.allowed, setting.meaning]
                yield _row(*cells, _named(changed[setting.name], setting))
        yield ""


def _changed_by() -> dict[str, list[str]]:
    """Map each setting to the shipped configs that change it.

    A config changes a setting if its value is not the default.
    """
    changed: dict[str, list[str]] = {name: [] for name in all_settings()}
    for path in sorted(SHIPPED.glob("*.toml")):
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        for name, setting in all_settings().items():
            value = tables.get(setting.section, {}).get(setting.field, setting.default)
            if value != setting.default:
                changed[name].append(path.stem)
    return changed


def _named(configs: list[str], setting: Setting) -> str:
    if setting.is_required:
        return "all"
    if len(configs) <= MOST_NAMED:
        return ", ".join(f"`{name}`" for name in configs) or "none"
    return f"{len(configs)} of {len(list(SHIPPED.glob('*.toml')))}"


def commands() -> Iterator[str]:
    """Yield the lines of the commands page.

    The page contains the description, usage, options and examples of every command.
    """
    for name in COMMANDS:
        yield from _command(name, _choices(make_parser([name]))[name])
        for words in VARIANTS:  # options with which a command has other options
            if name == words[0]:
                yield from _command(" ".join(words), _choices(make_parser(words))[name])


def _choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's sub-commands, by name."""
    found = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines that describe one command and its sub-commands."""
    below = _choices(parser)
    yield f"{'##' if name in COMMANDS else '###'} {name}"
    yield ""
    yield (parser.description or "").replace("[", "\\[")
    yield ""
    if not below:
        yield from _details(parser)
    for own, each in below.items():
        yield from _command(f"{name} {own}", each)


def _details(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the usage, options and examples of a command that has no sub-commands."""
    yield from ("```text", _usage(parser), "```", "")
    yield "| Argument | Meaning |"
    yield "|---|---|"
    has_titles = sum(bool(_shown(group)) for group in parser._action_groups) > 2
    for group in parser._action_groups:
        if (actions := _shown(group)) and group.title and has_titles:
            yield _row(f"**{group.title}**", "")
        for action in actions:
            yield _row(f"`{_spelled(action)}`", help_of(action) % vars(action))
    yield ""
    examples = (parser.epilog or "").splitlines()[1:]
    yield from ("```sh", *(line.strip() for line in examples), "```", "")


def _shown(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    """Return the arguments of a group to list on the page.

    --help and options with a suppressed help text are left out.
    """
    return [
        action
        for action in group._group_actions
        if action.help is not argparse.SUPPRESS and action.dest != "help"
    ]


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return the usage line of a command, with its positional arguments and required options."""
    words = [parser.prog]
    for group in parser._mutually_exclusive_groups:
        if group.required:
            words.append(f"({' | '.join(_spelled(action) for action in group._group_actions)})")
    positional = [action for action in parser._actions if not action.option_strings]
    required = [each for each in parser._actions if each.option_strings and each.required]
    words += [_spelled(action) for action in (*positional, *required)]
    return " ".join([*words, "[OPTIONS]"])


def _spelled(action: argparse.Action) -> str:
    """Return an argument as it is typed, with its option names, if any, and its value."""
    value = action.metavar
    if action.choices is not None:
        value = f"{{{','.join(map(str, action.choices))}}}"
    several = {"+": "{0} [{0} ...]", "*": "[{0} ...]", "?": "[{0}]"}
    shown = several.get(str(action.nargs), "{0}").format(value) if action.nargs != 0 else ""
    return " ".join(filter(None, [", ".join(action.option_strings), shown]))


def _code(value: object) -> str:
    return f"`{to_toml(value)}`"


def _row(*cells: str) -> str:
    escaped = (cell.replace("|", "\\|").replace("<", "\\<") for cell in cells)
    return f"| {' | '.join(escaped)} |"


if __name__ == "__main__":
    sys.exit(main())
