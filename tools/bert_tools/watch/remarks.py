"""What a run has said in words: the lines of its `stdout.log`."""

import re
from collections import deque

from mlperf_bert.common.errors import one_line

MAX_LINE_BYTES = 2 * 2**10
FIRST_BYTES = 256 * 2**10  # of a long log: its end is what counts
KEPT_LINES = 8
_MOST_NAMED = 9  # a run names eight slow ranks and counts the others
_TIME = re.compile(r"\d\d:\d\d:\d\d ")
_EVALUATION = re.compile(r"evaluation at [\d,]{1,20} samples: .*\((\d{1,9}\.\d) s\)")
_SLOW_RANK = re.compile(r"rank \d{1,9} on .* is slow: |\d{1,9} more ranks are slow$")
_START_UP = re.compile(r"sampler \w{1,40}, balance \w{1,40}")  # among its first lines
_PROGRESS = re.compile(r"step \d{1,19}/\d{1,19}  ")


class Remarks:
    """Takes one line after the other; keeps what is worth showing, all of it printable."""

    def __init__(self) -> None:
        self.evaluation_s: float | None = None  # what the last evaluation took
        self.is_start_up = False  # whether the run, or its resumption, has begun and no step ended
        self.slow_ranks: list[str] = []  # of the last comparison
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)  # the last ones, without progress

    def add(self, line: bytes) -> None:
        """Take a line, without its end."""
        text = one_line(line.decode("utf-8", errors="replace"))
        said = text[len("00:00:00 ") :] if _TIME.match(text) else text
        if _PROGRESS.match(said):
            self.is_start_up = False
            return
        self.is_start_up |= _START_UP.fullmatch(said) is not None
        if match := _EVALUATION.fullmatch(said):
            self.evaluation_s = float(match[1])
            self.slow_ranks = []  # the ranks are compared right after
        elif _SLOW_RANK.match(said) and len(self.slow_ranks) < _MOST_NAMED:
            self.slow_ranks.append(said)
        self.lines.append(text)
