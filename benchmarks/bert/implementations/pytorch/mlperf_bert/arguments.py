"""The argument parser of all commands, which shows examples and reports errors in one line."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from mlperf_bert.errors import MISTAKE, one_line, say_error
from mlperf_bert.suggestions import did_you_mean, or_list

# A parser or a titled group of its options.
Options = argparse._ActionsContainer

PROGRAM = "mlperf_bert"
_NUMBERS: dict[Any, str] = {int: "an integer", float: "a number"}


def describe(parser: argparse.ArgumentParser, description: str, *examples: str) -> None:
    """Set the texts that `--help` prints above and below the options of a command.

    `description` explains in one to three sentences what the command does, reads and writes. Each
    example is a complete command line that works.
    """
    parser.description = description
    title = "example:" if len(examples) == 1 else "examples:"
    parser.epilog = "\n".join([title, *(f"  {example}" for example in examples)])


def add_command(
    commands: "argparse._SubParsersAction[Any]",
    name: str,
    text: str,
    description: str,
    *examples: str,
) -> argparse.ArgumentParser:
    """Add a sub-command, and return its parser.

    `text` describes the sub-command in the list of commands. See `describe` for the other
    parameters.
    """
    command: argparse.ArgumentParser = commands.add_parser(name, help=text)
    describe(command, description, *examples)
    return command


class Parser(argparse.ArgumentParser):
    """An argument parser that rejects abbreviated options and reports errors in one line.

    The parsers of sub-commands have the same class.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _HelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self._given: Sequence[str] = ()  # the options that are parsed

    def error(self, message: str) -> NoReturn:
        """Print one line with the command, the mistake and a remedy, and exit with status 2."""
        if "arguments are required" in message:
            self._report_unknown(self._given)
        command = self.prog.removeprefix(PROGRAM).strip()
        where = f"{command}: " if command else ""
        remedy = "" if "; " in message else f"; see `{self.prog} --help`"
        message = message.replace("the following arguments are required: ", "missing ")
        say_error(one_line(f"{where}{message.removeprefix('argument ')}{remedy}"))
        sys.exit(MISTAKE)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse all arguments. An unknown argument is reported as an error of its sub-command."""
        given = list(sys.argv[1:] if args is None else args)
        before_end = given[: given.index("--")] if "--" in given else given
        self._given = [word for word in before_end if word.startswith("--")]
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._report_unknown([word for word in unknown if word.startswith("-")])
            self.error(f"unexpected argument {unknown[0]!r}")
        return found, unknown

    def _report_unknown(self, words: Sequence[str]) -> None:
        """Exit with an error for the first word that is not a known option, if there is one."""
        options = [option for action in self._actions for option in action.option_strings]
        for word in words:
            name = word.partition("=")[0]
            if name not in options:
                remedy = did_you_mean(name, options) if name.startswith("--") else ""
                self.error(f"unknown option {word!r}" + (f"; {remedy}" if remedy else ""))

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        if action.type not in _NUMBERS:
            return super()._get_value(action, text)
        try:
            return action.type(text)  # type: ignore[operator,misc]
        except ValueError:
            problem = f"{_name(action)} must be {_NUMBERS[action.type]}, not {text!r}"
            raise argparse.ArgumentError(None, problem) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            remedy = did_you_mean(value, names, f"use {or_list(names)}")
            raise argparse.ArgumentError(None, f"unknown command {value!r}; {remedy}")
        problem = f"{_name(action)} must be {or_list([repr(name) for name in names])}"
        remedy = did_you_mean(str(value), names)
        problem = f"{problem}, not {value!r}" + (f"; {remedy}" if remedy else "")
        raise argparse.ArgumentError(None, problem)


class _HelpFormatter(argparse.HelpFormatter):
    """A help formatter that shows default values and keeps the line breaks of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap each line of `text`, except indented lines, which are example commands."""
        return "\n".join(
            line
            if line.startswith(" ")
            else super(_HelpFormatter, self)._fill_text(line, width, "")
            for line in text.split("\n")
        )

    def _get_help_string(self, action: argparse.Action) -> str:
        return help_of(action)


def help_of(action: argparse.Action) -> str:
    """Return the help text of an option. The default is added unless the text contains it."""
    text, default = action.help or "", action.default
    is_shown = default is not argparse.SUPPRESS and isinstance(default, int | float | str)
    if action.option_strings and is_shown and not isinstance(default, bool):
        return text if "default:" in text else f"{text} (default: %(default)s)"
    return text


def _name(action: argparse.Action) -> str:
    if action.option_strings:
        return action.option_strings[-1]
    return action.metavar if isinstance(action.metavar, str) else action.dest
