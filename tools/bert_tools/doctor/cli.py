"""The sub-command `doctor`: its arguments, and what prints; heavy imports wait until it runs."""

import argparse
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bert_tools.doctor.checks import NAMES, make
from mlperf_bert.cli import network_test
from mlperf_bert.cli.network_test import Printer, network_alone, on_ranks, rank_info, read_options
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.distributed.network_test.findings import (
    NETWORK,
    Options,
    exit_status,
    fail,
    in_short,
)

if TYPE_CHECKING:
    from mlperf_bert.distributed.launch import RankInfo

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_LONGEST_S = 7 * 24 * 3600
_BURN_IN = "burn_in"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    network_test.add_arguments(parser)
    parser.add_argument("--data", type=Path, metavar="DIR", help="of the run to come: verify it")
    parser.add_argument(
        "--only", metavar="NAME,...", help=f"make these checks only: {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--burn-in", metavar="10m", help="train on every device for so long (90s, 10m, 1h) instead"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0, or 1 where something fails. Raises ConfigError for a wrong option."""
    if args.burn_in is not None:
        for option, value in (("--only", args.only), ("--data", args.data)):
            if value is not None:
                raise ConfigError(option, "is given beside --burn-in", "give one of them")
    options = read_options(args, args.data)
    names = _chosen(args)
    info = rank_info()
    printer = Printer(as_json=args.json, hand_over=args.hand_over)
    if args.burn_in is not None:
        return _burn_in(info, args.burn_in, options, printer)
    if info is not None and info.world_size > 1:
        from mlperf_bert.distributed.network_test.all_ranks import examine

        own = {name: partial(make, name, options) for name in names if name != NETWORK}
        return examine(info, own, options, printer.show_all, network=NETWORK in names)
    for name in names:
        printer.show(network_alone(options) if name == NETWORK else make(name, options))
    printer.show_all([])
    return exit_status(printer.findings)


def parse_duration(option: str, text: str) -> float:
    """Seconds of `90`, `90s`, `10m` or `1h`. Raises ConfigError naming the option."""
    match = re.fullmatch(r"([0-9]{1,7}(?:\.[0-9]{1,3})?)([smh]?)", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise ConfigError(
            option, f"is {text!r}", "give a time such as 90s, 10m or 1h, up to a week"
        )
    return seconds


def _chosen(args: argparse.Namespace) -> list[str]:
    if args.only is None:
        return list(NAMES)
    wanted = [name.strip() for name in args.only.split(",")]
    for name in wanted:
        if name not in NAMES:
            raise ConfigError("--only", f"has no check {name!r}", f"use {', '.join(NAMES)}")
    return [name for name in NAMES if name in wanted]


def _burn_in(info: "RankInfo | None", duration: str, options: Options, printer: Printer) -> int:
    seconds = parse_duration("--burn-in", duration)
    try:
        from bert_tools.doctor import burn_in
    except ImportError as error:
        remedy = "see mlperf_bert doctor --only packages"
        printer.show_all([fail(_BURN_IN, in_short(error), remedy)])
        return exit_status(printer.findings)
    assert info is not None  # torch is there

    ranks = burn_in.num_devices(options) if info.launcher == "single" else 1
    if ranks == 1:
        return burn_in.burn_in(info, seconds, options, printer.show_all)
    words = ("doctor", *options.words, "--burn-in", duration)
    printer.show_all(*on_ranks(words, ranks, _BURN_IN))
    return exit_status(printer.findings)
