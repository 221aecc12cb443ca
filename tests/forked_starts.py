"""Many starts of the command line, each a process of its own, of which one has imported torch."""

from typing import NamedTuple

from forked_ranks import run_forked


class Started(NamedTuple):
    """The outcome of a start."""

    status: int
    printed: str


def start_each(commands, *, without_rights=False):
    """Run them one after the other; `without_rights`, as root: held to the rights of files."""
    found = []
    for command in commands:
        options = {"without_rights": without_rights}
        (status,), printed = run_forked("mlperf_bert", [(command, {})], **options)
        found.append(Started(status, printed))
    return found
