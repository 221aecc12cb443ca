"""The sub-command `watch`: draw a run on the terminal repeatedly, and restore the terminal.

Signals that arrive meanwhile are kept, and handled when nothing is half done.
"""

import argparse
import json
import locale
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.signals.signal_watch import SignalPipe

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
        help="print one frame and end (default if stdout is no terminal)",
    )
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between looks (default 2)"
    )
    parser.add_argument(
        "--on-end",
        choices=("leave", "wait"),
        default="leave",
        help="when the run has ended: leave, or wait for the directory's next run",
    )
    parser.add_argument(
        "--characters",
        choices=("auto", "unicode", "ascii"),
        default="auto",
        help="characters of the curves (default: by the locale)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and end")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write all numbers as TensorBoard scalars as they come, into a directory for each run",
    )


def run(args: argparse.Namespace) -> int:
    """Show the run until it ends or a signal comes; 0 in both cases.

    Raises ConfigError for an impossible interval, DataError if RUN is no directory, or is missing
    with --once or --json.
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
    scalars = LiveScalars(args.out) if args.out else None
    watcher = Watcher(args.run_path, scalars)
    if args.json:
        print(json.dumps(watcher.whole_look().as_json(), allow_nan=False))
        return 0
    # NO_COLOR turns colours off, and so does a terminal without colours.
    console = OutputConsole(file=sys.stdout, highlight=False, markup=False, emoji=False)
    characters = _known_characters() if args.characters == "auto" else args.characters
    if is_once:
        # The size is the terminal's, or that in COLUMNS and LINES.
        width, height = shutil.get_terminal_size(_USUAL)
        _print_frame(console, watcher.whole_look(), width, height, characters)
        return 0
    if console.is_dumb_terminal:
        _follow_in_lines(console, watcher, args)
    else:
        _follow(console, watcher, args, characters)
    return 0


def _known_characters() -> "Characters":
    """The characters that the terminal can show, according to the locale."""
    # Python writes UTF-8 in the C locale too, but the terminal may not show it.
    names = (sys.stdout.encoding or "", locale.getencoding())
    is_unicode = all(name.lower().replace("-", "") == "utf8" for name in names)
    return "unicode" if is_unicode else "ascii"


class _Signals(SignalPipe):
    """Collects the signals that matter to a screen: `came` has those of the last wait."""

    def __init__(self) -> None:
        super().__init__((*ENDS, *_OTHERS))
        self.came: set[signal.Signals] = set()

    def suspend(self) -> None:
        """Stop this process like Ctrl-Z; returns when it continues."""
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self.note)


def _looks(
    signals: _Signals, watcher: "Watcher", args: argparse.Namespace
) -> Iterator[tuple["Look", bool]]:
    """Yield looks until the run ends or a signal comes, each with True if there is more to read."""
    while True:
        look, has_more = watcher.look()
        yield look, has_more
        if look.phase == "ended" and not has_more and args.on_end == "leave":
            return
        signals.came = set(signals.wait(0.0 if has_more else args.interval))
        if signals.came & ENDS:
            return


def _follow(
    console: "Console", watcher: "Watcher", args: argparse.Namespace, characters: "Characters"
) -> None:
    """Follow the run on the whole terminal."""
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
                signals.suspend()
                live.start()
            width, height = console.size = _terminal_size()
            lines = frame(look, width, height, characters, hint)
            if signals.came or lines != drawn:  # do not send the same frame over the network again
                live.update(Group(*lines), refresh=True)
            drawn = lines
    if look.phase == "ended":
        _print_frame(console, look, width, height, characters)


def _follow_in_lines(console: "Console", watcher: "Watcher", args: argparse.Namespace) -> None:
    """Follow the run by a line for each change, on terminals without cursor movement."""
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

    lines = frame(look, width, max(2, height - 1), characters, "")  # the prompt follows below
    while lines and not lines[-1].plain.strip():
        lines.pop()
    for line in lines:
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False, width=max(width, 1))


def _terminal_size() -> tuple[int, int]:
    """The present terminal size; COLUMNS and LINES may be outdated."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return _USUAL
    return size.columns or _USUAL[0], size.lines or _USUAL[1]
