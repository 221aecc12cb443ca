"""A terminal that a test can read, and `mlperf_bert watch` on it."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

import pyte

PATIENCE_S = 120.0
WATCH = (sys.executable, "-m", "mlperf_bert", "watch")


class Terminal:
    """Runs `mlperf_bert watch ...` on a terminal of its own, drawn as a real one."""

    def __init__(self, *arguments, program=WATCH, stderr=None, **environ):
        self._ours, theirs = pty.openpty()
        columns, rows = 80, 24
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._is_open = True
        self._set_size(columns, rows)
        self._theirs = theirs
        self.settings_before = termios.tcgetattr(theirs)
        inherited = {key: os.environ[key] for key in os.environ if key not in ("NO_COLOR", "TERM")}
        self.process = subprocess.Popen(
            [*program, *map(str, arguments)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs if stderr is None else stderr,
            env={**inherited, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **environ},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C arrives
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        if self._is_open:
            self.hang_up()

    @property
    def text(self):
        return "\n".join(line.rstrip() for line in self.screen.display)

    @property
    def settings(self):
        return termios.tcgetattr(self._theirs)

    def until(self, condition):
        """Show what comes until the condition holds."""
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end_s, self.text
            self._show(0.05)

    def until_left(self):
        """Show what comes until the program has ended; its status."""
        self.until(lambda: self.process.poll() is not None)
        while self._show(0.0):
            pass
        return self.process.wait()

    def hang_up(self):
        """Close the terminal, as when a connection is lost."""
        self._is_open = False
        os.close(self._theirs)
        os.close(self._ours)

    def type(self, keys):
        os.write(self._ours, keys)

    def resize(self, columns, rows):
        self.screen.resize(rows, columns)
        self._set_size(columns, rows)

    def _set_size(self, columns, rows):
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _show(self, seconds):
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        came = os.read(self._ours, 65536)
        self.raw += came
        self._stream.feed(came)
        return True
