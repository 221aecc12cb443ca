"""Lines of this program on stderr, each in one write: those of several ranks must not mix."""

import sys
from contextlib import suppress


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
