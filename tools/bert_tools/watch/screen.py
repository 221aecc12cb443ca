"""Draws a run on the terminal, again and again, and leaves the terminal as it was.

Signals that come meanwhile are kept, and looked at when nothing is half done.
"""

import locale
import os
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from bert_tools.watch.frame import frame, status_line
from bert_tools.watch.look import Look
from bert_tools.watch.plot import Characters
from mlperf_bert.common.console import OutputConsole
from mlperf_bert.signals.signal_watch import SignalPipe

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OTHERS = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)

OnEnd = Literal["leave", "wait"]
LookAgain = Callable[[], tuple[Look, bool]]
_USUAL = (80, 24)


class Signals(SignalPipe):
    """Tells of the signals that matter to a screen."""

    def __init__(self) -> None:
        super().__init__((*ENDS, *OTHERS))

    def suspend(self) -> None:
        """Stop this process as Ctrl-Z does; returns when it goes on."""
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self.note)


def known_characters() -> Characters:
    """What the terminal can show, as far as the locale says it."""
    # Python writes UTF-8 in the C locale too; what the terminal then shows, nobody knows.
    names = (sys.stdout.encoding or "", locale.getencoding())
    is_unicode = all(name.lower().replace("-", "") == "utf8" for name in names)
    return "unicode" if is_unicode else "ascii"


def make_console() -> Console:
    """Writes to stdout; colours are off by NO_COLOR, or where the terminal has none."""
    return OutputConsole(file=sys.stdout, highlight=False, markup=False, emoji=False)


def print_once(look_again: LookAgain, characters: Characters) -> Look:
    """One frame, of the size of the terminal, or of what COLUMNS and LINES say, or 80 x 24."""
    look, has_more = look_again()
    while has_more:
        look, has_more = look_again()
    console = make_console()
    width, height = shutil.get_terminal_size(_USUAL)
    _print_frame(console, look, width, max(2, height - 1), characters)  # a prompt comes below
    return look


def _print_frame(
    console: Console, look: Look, width: int, height: int, characters: Characters
) -> None:
    lines = frame(look, width, height, characters, "")
    while lines and not lines[-1].plain.strip():
        lines.pop()
    for line in lines:
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False, width=max(width, 1))


def follow(look_again: LookAgain, interval_s: float, characters: Characters, on_end: OnEnd) -> int:
    """Draw until the run has ended, or a signal comes; the exit status."""
    console = make_console()
    drawn = _follow_in_lines if console.is_dumb_terminal else _follow_in_frames
    with Signals() as signals:
        return drawn(console, signals, look_again, interval_s, characters, on_end)


def _follow_in_frames(
    console: Console,
    signals: Signals,
    look_again: LookAgain,
    interval_s: float,
    characters: Characters,
    on_end: OnEnd,
) -> int:
    hint = f"every {interval_s:g} s; Ctrl-C leaves, the run goes on"
    live = Live(
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    live.start()
    drawn: list[Text] = []
    try:
        while True:
            look, has_more = look_again()
            width, height = _terminal_size()
            console.size = (width, height)
            lines = frame(look, width, height, characters, hint)
            if lines != drawn:  # what has not changed need not go over the network again
                live.update(Group(*lines), refresh=True)
            if look.phase == "ended" and not has_more and on_end == "leave":
                break
            came = signals.wait(0.0 if has_more else interval_s)
            drawn = [] if came else lines
            if set(came) & set(ENDS):
                break
            if signal.SIGTSTP in came:
                live.stop()
                signals.suspend()
                live.start()
    finally:
        live.stop()
    if look.phase == "ended":
        _print_frame(console, look, width, max(2, height - 1), characters)
    return 0


def _follow_in_lines(
    console: Console,
    signals: Signals,
    look_again: LookAgain,
    interval_s: float,
    characters: Characters,
    on_end: OnEnd,
) -> int:
    """A line for each change, where nothing can be drawn over."""
    said: set[str] = set()
    while True:
        look, has_more = look_again()
        lines = [] if has_more else [status_line(look), *(f"! {each.text}" for each in look.alerts)]
        for line in lines:
            if line not in said:
                console.print(Text(line), soft_wrap=True)
        said = set(lines) or said
        if look.phase == "ended" and not has_more and on_end == "leave":
            return 0
        if set(ENDS).intersection(signals.wait(0.0 if has_more else interval_s)):
            return 0


def _terminal_size() -> tuple[int, int]:
    """As it is now: COLUMNS and LINES would be those of the start."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return _USUAL
    return size.columns or _USUAL[0], size.lines or _USUAL[1]
