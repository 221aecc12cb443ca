"""What a user is told: errors to mend, in one line on stderr, and the program's exit statuses.

An error says where, what is wrong, and how to put it right. Launchers act on the statuses, which
docs/cluster.md explains. A line is one write: those of several ranks must not mix.
"""

import sys
from contextlib import suppress

FAULT = 1  # of ours, with a traceback
MISTAKE = 2  # that the user can mend, in one line; argparse has the same
TARGET_MISSED = 3
LOST = 70  # other ranks are gone or do not answer, or something hangs
STOPPED = 75  # a signal asked for the end: after saving, or before there was anything to save
INTERRUPTED = 130  # as of what SIGINT ends, which a second Ctrl-C does
NOBODY_READS = 141  # as of what SIGPIPE ends: `| head` has seen enough

_LONGEST = 1200  # characters of each part; the paths and lists of ours are shorter


def one_line(text: str) -> str:
    """`text` as a terminal may show it: line ends, escapes and the like written out, and not long.

    Names in it may come from files that anybody has written.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class UserError(Exception):
    """Base of everything the command line reports as one line, without a traceback.

    `where` is the config field, file or argument at fault, `problem` what is wrong with it, with
    the offending value, `remedy` what to do about it.
    """

    exit_status = MISTAKE

    def __init__(self, where: str, problem: str, remedy: str) -> None:
        super().__init__(where, problem, remedy)  # as given, so that it travels between processes

    def __str__(self) -> str:
        where, problem, remedy = map(one_line, self.args)
        return f"{where}: {problem}; {remedy}"


class ConfigError(UserError):
    """A setting, an option, an environment variable or an installation that cannot work."""


class DataError(UserError):
    """A text, vocabulary, shard, sidecar or index that is missing, damaged or inconsistent."""


class UnreadableError(DataError):
    """A file that is there and cannot be read: a right is missing, or a file system fails.

    Nobody knows what it holds, so it is not taken for damaged: whoever goes on without what is
    damaged must not catch this.
    """


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete, damaged or made for another model."""


class LostRanksError(UserError):
    """Other ranks that do not answer any more: dead, hung, or behind a broken network."""

    exit_status = LOST


def say(text: str) -> None:
    """Write `mlperf_bert: <text>`, after what was printed; a stderr that is gone is no error."""
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        sys.stderr.write(f"mlperf_bert: {text}\n")
        sys.stderr.flush()


def say_error(line: object) -> None:
    """Say why the program ends, in one line."""
    say(f"error: {line}")
