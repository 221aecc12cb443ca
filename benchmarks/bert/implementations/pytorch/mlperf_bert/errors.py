"""Messages to the user: one-line errors on stderr, exit statuses, and commands to type next.

An error states the place, the problem there, and how to fix this problem. Launchers act on the exit
statuses, which docs/guides/clusters.md explains. Each line is written in one call, so that lines of
several ranks do not mix.
"""

import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

FAULT = 1  # a bug in this program, reported with a traceback
MISTAKE = 2  # an error that the user can fix, reported in one line as argparse does
TARGET_MISSED = 3
LOST = 70  # other ranks do not answer, or this rank hangs
STOPPED = 75  # a signal ended the run, after saving or before there was anything to save
INTERRUPTED = 130  # ended by SIGINT, at the second Ctrl-C
NOBODY_READS = 141  # ended by SIGPIPE, for example because `| head` closed the pipe

_LONGEST = 1200  # characters per part of a message, more than our own paths and lists have


def one_line(text: str) -> str:
    """Shorten `text` and escape its control characters, so that a terminal can print it safely.

    The text may contain names from untrusted files.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class UserError(Exception):
    """Base class of errors that the command line reports in one line, without a traceback.

    `where` is the setting, file or argument at fault. `problem` describes what is wrong with it and
    quotes its value. `remedy` describes how to fix the problem, and may be empty.
    """

    exit_status = MISTAKE
    is_of_all_ranks = False  # True if all ranks raise this error together
    is_said = False  # True once the error has been printed

    def __init__(self, where: str, problem: str, remedy: str) -> None:
        super().__init__(where, problem, remedy)  # all three, so that it can be pickled

    def __str__(self) -> str:
        where, problem, remedy = map(one_line, self.args)
        return f"{where}: {problem}; {remedy}" if remedy else f"{where}: {problem}"


class ConfigError(UserError):
    """An error in a setting, an option, an environment variable or the installation."""


class DataError(UserError):
    """An error for a missing, damaged or inconsistent text, vocabulary, shard, sidecar or index."""


class UnreadableError(DataError):
    """An error for an existing file that its permissions or a failing file system make unreadable.

    The contents of the file are unknown, so the file does not count as damaged. Code that skips
    damaged files must not catch this error.
    """


class CheckpointError(UserError):
    """An error for a checkpoint that is missing, incomplete, damaged or for another model."""


class LostRanksError(UserError):
    """An error for other ranks that do not answer, because of a crash, a hang or the network."""

    exit_status = LOST


def is_out_of_memory(error: Exception) -> bool:
    """Return True if `error` reports that torch or Python ran out of memory.

    The function does not import torch.
    """
    torch = sys.modules.get("torch")
    is_gpus = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return is_gpus or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def say(text: str) -> None:
    """Flush stdout, and write `mlperf_bert: <text>` to stderr. Write errors are ignored."""
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        sys.stderr.write(f"mlperf_bert: {text}\n")
        sys.stderr.flush()


def say_error(line: object) -> None:
    """Print an error in one line on stderr, unless it was already printed."""
    if not getattr(line, "is_said", False):
        say(f"error: {line}")


def typed(*words: object) -> str:
    """Return a command of this program, quoted for the user's shell.

    The command begins with `mlperf_bert` if the shell finds this program under that name, and
    otherwise with the path of the program.
    """
    own, found = Path(sys.executable).with_name("mlperf_bert"), shutil.which("mlperf_bert")
    program = [sys.executable, "-P", "-m", "mlperf_bert"]
    if os.access(own, os.X_OK):
        is_found = found is not None and os.path.samefile(found, own)
        program = ["mlperf_bert" if is_found else str(own)]
    return shlex.join([*program, *map(str, words)])
