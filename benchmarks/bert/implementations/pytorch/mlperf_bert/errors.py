"""Messages to the user: one-line errors on stderr, exit statuses, commands to type next.

An error says where, what is wrong, and the remedy. Launchers act on the statuses, which
docs/guides/clusters.md explains. Each line is one write, so lines of several ranks do not mix.
"""

import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

FAULT = 1  # a bug of ours, with a traceback
MISTAKE = 2  # an error that the user can mend, in one line; argparse uses the same
TARGET_MISSED = 3
LOST = 70  # other ranks do not answer, or something hangs
STOPPED = 75  # a signal ended the run: after saving, or before there was anything to save
INTERRUPTED = 130  # ended by SIGINT (a second Ctrl-C)
NOBODY_READS = 141  # ended by SIGPIPE: `| head` has closed the pipe

_LONGEST = 1200  # characters of each part; our own paths and lists are shorter


def one_line(text: str) -> str:
    """`text` made safe for a terminal: shortened, with line ends and escapes written out.

    It may contain names from untrusted files.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class UserError(Exception):
    """Base of errors that the command line reports in one line, without a traceback.

    `where` is the config field, file or argument at fault, `problem` says what is wrong with it and
    gives the value, `remedy` says what to do.
    """

    exit_status = MISTAKE
    is_of_all_ranks = False  # that raise it together
    is_said = False

    def __init__(self, where: str, problem: str, remedy: str) -> None:
        super().__init__(where, problem, remedy)  # so that it can be pickled

    def __str__(self) -> str:
        where, problem, remedy = map(one_line, self.args)
        return f"{where}: {problem}; {remedy}"


class ConfigError(UserError):
    """A setting, an option, an environment variable or an installation that cannot work."""


class DataError(UserError):
    """A text, vocabulary, shard, sidecar or index that is missing, damaged or inconsistent."""


class UnreadableError(DataError):
    """An existing file that cannot be read: a permission is missing, or the file system fails.

    Its contents are unknown, so it does not count as damaged: code that skips damaged files must
    not catch this error.
    """


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete, damaged or made for another model."""


class LostRanksError(UserError):
    """Other ranks do not answer: they are dead, hung, or behind a broken network."""

    exit_status = LOST


def is_out_of_memory(error: Exception) -> bool:
    """True for Python's or torch's out-of-memory error, without importing torch."""
    torch = sys.modules.get("torch")
    is_gpus = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return is_gpus or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def say(text: str) -> None:
    """Flush stdout, then write `mlperf_bert: <text>` to stderr; a closed stderr is no error."""
    with suppress(OSError):
        sys.stdout.flush()
    with suppress(OSError):
        sys.stderr.write(f"mlperf_bert: {text}\n")
        sys.stderr.flush()


def say_error(line: object) -> None:
    """Print in one line why the program ends; nothing if rank 0 says it for all ranks."""
    if not getattr(line, "is_said", False):
        say(f"error: {line}")


def typed(*words: object) -> str:
    """A command of this program, quoted for the shell that started it.

    It begins with `mlperf_bert` if that shell finds this program, else with its path.
    """
    beside, found = Path(sys.executable).with_name("mlperf_bert"), shutil.which("mlperf_bert")
    program = [sys.executable, "-P", "-m", "mlperf_bert"]
    if os.access(beside, os.X_OK):
        is_found = found is not None and os.path.samefile(found, beside)
        program = ["mlperf_bert" if is_found else str(beside)]
    return shlex.join([*program, *map(str, words)])
