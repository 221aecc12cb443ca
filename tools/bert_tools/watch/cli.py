"""The sub-command `watch`: its arguments, and what it prints."""

import argparse
import json
import sys
from pathlib import Path

from mlperf_bert.common.errors import ConfigError, DataError

_SHORTEST_S, _LONGEST_S = 0.1, 3600.0


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


def run(args: argparse.Namespace) -> int:
    """Show the run until it ends or a signal comes; 0 in both cases.

    Raises ConfigError for an interval that cannot be, DataError where RUN is no directory, or with
    --once or --json is not there.
    """
    from bert_tools.watch.look import Watcher
    from bert_tools.watch.screen import follow, known_characters, print_once
    from bert_tools.watch.snapshot import snapshot

    if not _SHORTEST_S <= args.interval <= _LONGEST_S:
        problem = f"is {args.interval:g} s"
        raise ConfigError("--interval", problem, f"give {_SHORTEST_S:g} .. {_LONGEST_S:g} seconds")
    watcher = Watcher(args.run_path)
    characters = known_characters() if args.characters == "auto" else args.characters
    is_once = args.once or args.json or not sys.stdout.isatty()
    if is_once and not args.run_path.exists():
        raise DataError(str(args.run_path), "does not exist", "give a run directory")
    if args.json:
        look, has_more = watcher.look()
        while has_more:
            look, has_more = watcher.look()
        print(json.dumps(snapshot(look), allow_nan=False))
        return 0
    if is_once:
        print_once(watcher.look, characters)
        return 0
    return follow(watcher.look, args.interval, characters, args.on_end)
