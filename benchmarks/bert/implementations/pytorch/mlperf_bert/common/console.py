"""rich's console for what this program prints, which says when nobody reads it any more."""

import errno
import os
from typing import NoReturn

from rich.console import Console


class OutputConsole(Console):
    """Where the reader of a pipe has gone, it raises BrokenPipeError once, and then is quiet.

    rich's own leaves the program with status 1 there: a training would end because of `| head`.
    """

    def on_broken_pipe(self) -> NoReturn:
        """Called by rich in the place of the error."""
        self.quiet = True
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def forget(self) -> None:
        """Drop what could not be written; else rich keeps it, and tries all of it each time."""
        was_quiet, self.quiet = self.quiet, True
        self.print()
        self.quiet = was_quiet
