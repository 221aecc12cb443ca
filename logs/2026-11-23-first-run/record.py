"""Record what a command shows, as a person sees it: an asciicast, and how long it was silent.

    python3 record.py OUT.cast [--as-file] COMMAND ...
    python3 record.py OUT.cast [--as-file]              # figures of a recording

The command runs on a terminal of 100 columns; with --as-file its output is no terminal. `OUT.cast`
(asciicast v2) plays what it showed. Seconds from the start are printed: to the first line, to the
first step of training, to the result; and the longest time in which nothing moved, with the words
before it. Any output is a move on a terminal, a whole line elsewhere.
"""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

COLUMNS, ROWS = 100, 30
MARKS = {
    "first line": rb"\S[^\r\n]*[\r\n]",
    "first step": rb"step [1-9]\d*/\d",
    "result": rb"RESULT,bert,|own text has no target",
}
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown(command, as_file):
    """Seconds from the start, and what came then; last the command's exit status."""
    start = time.monotonic()
    reader, writer = os.pipe() if as_file else pty.openpty()
    if not as_file:
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, start_new_session=True
    )
    os.close(writer)
    while True:
        try:
            data = os.read(reader, 65536)
        except OSError:  # a terminal whose last writer has left
            data = b""
        yield time.monotonic() - start, data
        if not data:
            break
    yield time.monotonic() - start, process.wait()


def recorded(out, command, as_file):
    """What `shown` yields, written into a new file `out`."""
    with open(out, "x") as cast:
        header = {"version": 2, "width": COLUMNS, "height": ROWS, "timestamp": int(time.time())}
        print(json.dumps(header), file=cast)
        for at, data in shown(command, as_file):
            if data and isinstance(data, bytes):
                print(json.dumps([round(at, 3), "o", data.decode(errors="replace")]), file=cast)
            yield at, data


def played(out):
    """Seconds from the start, and what came then, of a recording; its last moment is its end."""
    at = 0.0
    with open(out) as cast:
        for line in list(cast)[1:]:
            at, _, data = json.loads(line)
            yield at, data.encode()
    yield at, b""


def main(out, *words):
    """Run, write, measure and print; the command's exit status."""
    as_file = words[:1] == ("--as-file",)
    command = words[as_file:]
    text, times, silence, since, status = b"", dict.fromkeys(MARKS), (0.0, ""), 0.0, 0
    for at, data in recorded(out, command, as_file) if command else played(out):
        if isinstance(data, int):
            status = data
        if isinstance(data, int) or not data or not as_file or b"\n" in data:
            if at - since > silence[0]:
                lines = CONTROL.sub("", text.decode(errors="replace")).split()
                silence = (at - since, " ".join(lines)[-70:])
            since = at
        if isinstance(data, bytes):
            text = text[-4096:] + data
            for name, pattern in MARKS.items():
                if times[name] is None and re.search(pattern, text):
                    times[name] = at
    for name, at in times.items():
        print(f"{name}: " + ("none" if at is None else f"{at:.1f} s"))
    print(f"end: {since:.1f} s" + (f", status {status}" if command else ""))
    print(f"longest silence: {silence[0]:.1f} s, after: {silence[1] or 'the start'}")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
