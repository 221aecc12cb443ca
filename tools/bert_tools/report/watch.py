"""The sub-command `watch`: draws a run on the terminal, again and again, and leaves it as it was.

Signals that come meanwhile are kept, and looked at when nothing is half done.
"""

import argparse
import json
import locale
import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

from mlperf_bert.common.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from bert_tools.report.watch_frame import Characters
    from bert_tools.report.watch_look import Look, Watcher

_SHORTEST_S, _LONGEST_S = 0.1, 3600.0
ENDS = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
_OTHERS = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
_USUAL = (80, 24)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `watch`."""
    parser.add_argument(
        "run_path", type=Path, metavar="RUN", help="run directory (its newest run), or its run_<i>"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print one frame and end; so it is where stdout is no terminal",
    )
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between looks (default 2)"
    )
    parser.add_argument(
        "--on-end",
        choices=("leave", "wait"),
        default="leave",
        help="when the run has ended: leave, or wait for the next one of the directory",
    )
    parser.add_argument(
        "--characters",
        choices=("auto", "unicode", "ascii"),
        default="auto",
        help="what curves are drawn with (default: what the locale says)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and end")
    parser.add_argument(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="write all numbers as TensorBoard scalars as they come, into a directory for each run",
    )


def run(args: argparse.Namespace) -> int:
    """Show the run until it ends or a signal comes; 0 in both cases.

    Raises ConfigError for an interval that cannot be, DataError where RUN is no directory, or with
    --once or --json is not there.
    """
    from bert_tools.report.tensorboard import LiveScalars
    from bert_tools.report.watch_look import Watcher
    from mlperf_bert.common.console import OutputConsole

    if not _SHORTEST_S <= args.interval <= _LONGEST_S:
        problem = f"is {args.interval:g} s"
        raise ConfigError("--interval", problem, f"give {_SHORTEST_S:g} .. {_LONGEST_S:g} seconds")
    is_once = args.once or args.json or not sys.stdout.isatty()
    if is_once and not args.run_path.exists():
        raise DataError(str(args.run_path), "does not exist", "give a run directory")
    scalars = LiveScalars(args.tensorboard) if args.tensorboard else None
    watcher = Watcher(args.run_path, scalars)
    if args.json:
        print(json.dumps(watcher.whole_look().as_json(), allow_nan=False))
        return 0
    # Colours are off by NO_COLOR, or where the terminal has none.
    console = OutputConsole(file=sys.stdout, highlight=False, markup=False, emoji=False)
    characters = _known_characters() if args.characters == "auto" else args.characters
    if is_once:
        # Of the size of the terminal, or of what COLUMNS and LINES say.
        width, height = shutil.get_terminal_size(_USUAL)
        _print_frame(console, watcher.whole_look(), width, height, characters)
        return 0
    if console.is_dumb_terminal:
        _follow_in_lines(console, watcher, args)
    else:
        _follow(console, watcher, args, characters)
    return 0


def _known_characters() -> "Characters":
    """What the terminal can show, as far as the locale says it."""
    # Python writes UTF-8 in the C locale too; what the terminal then shows, nobody knows.
    names = (sys.stdout.encoding or "", locale.getencoding())
    is_unicode = all(name.lower().replace("-", "") == "utf8" for name in names)
    return "unicode" if is_unicode else "ascii"


class _Signals:
    """Collects signals while used as a context, in the main thread; whose they were comes back."""

    def __enter__(self) -> Self:
        self.came: set[signal.Signals] = set()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = {number: signal.signal(number, _nothing) for number in (*ENDS, *_OTHERS)}
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def wait(self, seconds: float) -> None:
        """Until one comes, or the time is over: `came` has those of this time."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        self.came = {signal.Signals(each) for each in os.read(self._read, 512)} if ready else set()


def _suspend() -> None:
    """Stop this process as Ctrl-Z does; returns when it goes on."""
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, _nothing)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """What came is in the pipe."""


def _looks(
    signals: _Signals, watcher: "Watcher", args: argparse.Namespace
) -> Iterator[tuple["Look", bool]]:
    """Moments, and whether more is there at once, until the run has ended or a signal comes."""
    while True:
        look, has_more = watcher.look()
        yield look, has_more
        if look.phase == "ended" and not has_more and args.on_end == "leave":
            return
        signals.wait(0.0 if has_more else args.interval)
        if signals.came & ENDS:
            return


def _follow(
    console: "Console", watcher: "Watcher", args: argparse.Namespace, characters: "Characters"
) -> None:
    """Draw over the whole terminal."""
    from rich.console import Group
    from rich.live import Live

    from bert_tools.report.watch_frame import frame

    hint = f"every {args.interval:g} s; Ctrl-C leaves, the run goes on"
    live = Live(
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    drawn: list[Text] = []
    with _Signals() as signals, live:
        for look, _ in _looks(signals, watcher, args):
            if signal.SIGTSTP in signals.came:
                live.stop()
                _suspend()
                live.start()
            width, height = console.size = _terminal_size()
            lines = frame(look, width, height, characters, hint)
            if signals.came or lines != drawn:  # the same need not go over the network again
                live.update(Group(*lines), refresh=True)
            drawn = lines
    if look.phase == "ended":
        _print_frame(console, look, width, height, characters)


def _follow_in_lines(console: "Console", watcher: "Watcher", args: argparse.Namespace) -> None:
    """A line for each change, where nothing can be drawn over."""
    from rich.text import Text

    from bert_tools.report.watch_frame import status_line

    said: set[str] = set()
    with _Signals() as signals:
        for look, has_more in _looks(signals, watcher, args):
            alerts = (f"! {each.text}" for each in look.alerts)
            lines = [] if has_more else [status_line(look), *alerts]
            for line in lines:
                if line not in said:
                    console.print(Text(line), soft_wrap=True)
            said = set(lines) or said


def _print_frame(
    console: "Console", look: "Look", width: int, height: int, characters: "Characters"
) -> None:
    from bert_tools.report.watch_frame import frame

    lines = frame(look, width, max(2, height - 1), characters, "")  # a prompt comes below
    while lines and not lines[-1].plain.strip():
        lines.pop()
    for line in lines:
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False, width=max(width, 1))


def _terminal_size() -> tuple[int, int]:
    """As it is now: COLUMNS and LINES would be those of the start."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return _USUAL
    return size.columns or _USUAL[0], size.lines or _USUAL[1]
