"""Errors that a user can mend: one line that says where, what is wrong, and how to put it right."""

from mlperf_bert.common.exit_statuses import LOST, MISTAKE

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

    Args:
        where: config field, file or argument at fault.
        problem: what is wrong with it, with the offending value.
        remedy: what to do about it.
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
