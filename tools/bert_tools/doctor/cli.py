"""The sub-command `doctor`: its arguments and its printing; heavy imports wait until it runs."""

import argparse
import importlib
import itertools
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlperf_bert.common.errors import FAULT, STOPPED, ConfigError
from mlperf_bert.config.options import add_config
from mlperf_bert.distributed.network_test.findings import (
    NETWORK,
    Finding,
    Options,
    as_json,
    examined,
    exit_status,
    fail,
    from_json,
    in_short,
)

if TYPE_CHECKING:
    from mlperf_bert.distributed.launch import RankInfo

_LOCAL = {  # the checks of a single machine, in order
    "gpus": "gpus.check",
    "machine": "host.check_machine",
    "disk": "storage.check_disk",
    "limits": "host.check_limits",
    "packages": "packages.check",
    "data": "storage.check_data",
    "caches": "host.check_caches",
}
NAMES = (*_LOCAL, NETWORK)
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_LONGEST_S = 7 * 24 * 3600
_CPU_RANKS = 2  # ranks of the network check with fewer than two GPUs
_BURN_IN = "burn_in"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    add_config(parser, "of the run to come", required=False)
    parser.add_argument("--data", type=Path, metavar="DIR", help="of the run to come: verify it")
    parser.add_argument(
        "--only", metavar="NAME,...", help=f"make these checks only: {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--all", action="store_true", help="list optional packages that nothing here needs, too"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--burn-in", metavar="10m", help="train on every device for so long (90s, 10m, 1h) instead"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time limit of a check, and of the wait for a rank (default 60)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    # Ranks that this command started write their findings there and print nothing.
    parser.add_argument("--hand-over", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0, or 1 if something fails. Raises ConfigError for a wrong option."""
    options = _options(args)
    names = _chosen(args)
    burn_in_s = None if args.burn_in is None else parse_duration("--burn-in", args.burn_in)
    info = _rank_info()
    printer = _Printer(args.json, args.hand_over)
    if burn_in_s is not None:
        return _burn_in(info, burn_in_s, options, printer)
    if info is not None and info.world_size > 1:
        from mlperf_bert.distributed.network_test.all_ranks import examine

        own = [partial(_make, name, options) for name in names if name != NETWORK]
        return examine(info, own, options, printer.show_all, network=NETWORK in names)
    for name in names:
        printer.show(_network_alone(options) if name == NETWORK else _make(name, options))
    printer.finish({})
    return exit_status(printer.findings)


def _make(name: str, options: Options) -> list[Finding]:
    """Make one of the local checks; it never raises."""

    def check() -> list[Finding]:
        # Imported here, so that a missing package fails only its own check.
        module, _, function = _LOCAL[name].partition(".")
        found = importlib.import_module(f"bert_tools.doctor.{module}")
        findings: list[Finding] = getattr(found, function)(options)
        return findings

    return examined(name, check, options.timeout_s)


def parse_duration(option: str, text: str) -> float:
    """Seconds of `90`, `90s`, `10m` or `1h`. Raises ConfigError naming the option."""
    match = re.fullmatch(r"([0-9]{1,7}(?:\.[0-9]{1,3})?)([smh]?)", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise ConfigError(
            option, f"is {text!r}", "give a time such as 90s, 10m or 1h, up to a week"
        )
    return seconds


class _Printer:
    """Prints findings as they come, or all at the end as JSON; ranks hand theirs over."""

    def __init__(self, as_json: bool, hand_over: Path | None) -> None:
        self._json = as_json
        self._hand_over = hand_over
        self.findings: list[Finding] = []

    def show(self, findings: Sequence[Finding]) -> None:
        self.findings += findings
        if not self._json and self._hand_over is None:
            for finding in findings:
                print(finding.line(), flush=True)

    def show_all(self, findings: Sequence[Finding], more: dict[str, Any] | None = None) -> None:
        self.show(findings)
        self.finish(more or {})

    def finish(self, more: dict[str, Any]) -> None:
        result = {**as_json(self.findings), **more}
        if self._hand_over is not None:
            self._hand_over.write_text(json.dumps(result), encoding="utf-8")
        elif self._json:
            print(json.dumps(result), flush=True)


def _options(args: argparse.Namespace) -> Options:
    from mlperf_bert.config.files import load_config

    if args.burn_in is not None:
        for option, value in (("--only", args.only), ("--data", args.data)):
            if value is not None:
                raise ConfigError(option, "is given beside --burn-in", "give one of them")
    if args.set and args.config is None:
        raise ConfigError("--set", "is given without --config", "give a config")
    given = [("--timeout", args.timeout), ("--config", args.config), ("--burn-in", args.burn_in)]
    given += [("--set", override) for override in args.set]
    words = [(option, str(value)) for option, value in given if value is not None]
    return Options(
        config=load_config(args.config, args.set) if args.config else None,
        data=args.data,
        device=args.device,
        all_packages=args.all,
        timeout_s=args.timeout,
        command=("doctor", *itertools.chain(*words)),
    )


def _chosen(args: argparse.Namespace) -> list[str]:
    if args.only is None:
        return list(NAMES)
    wanted = [name.strip() for name in args.only.split(",")]
    for name in wanted:
        if name not in NAMES:
            raise ConfigError("--only", f"has no check {name!r}", f"use {', '.join(NAMES)}")
    return [name for name in NAMES if name in wanted]


def _rank_info() -> "RankInfo | None":
    """This process's rank; None if torch cannot be imported, which the checks then report."""
    try:
        import torch  # noqa: F401

        from mlperf_bert.distributed.launch import read_rank_info
    except Exception:
        return None
    return read_rank_info()


def _network_alone(options: Options) -> list[Finding]:
    """Start ranks on this machine to test the network between them."""
    try:
        import torch

        num_gpus = torch.cuda.device_count() if options.wanted_device != "cpu" else 0
        use_gpus = num_gpus >= _CPU_RANKS
        ranks = num_gpus if use_gpus else _CPU_RANKS
        device = "cuda" if use_gpus else "cpu"
        words = (*options.command, "--only", NETWORK, "--device", device)
        findings, _ = _on_ranks(replace(options, command=words), ranks, NETWORK)
    except Exception as error:  # torch that cannot be imported, ranks that cannot be started
        return [fail(NETWORK, in_short(error), "mend torch (the check `packages`)")]
    return findings


def _on_ranks(options: Options, ranks: int, name: str) -> tuple[list[Finding], dict[str, Any]]:
    """Findings of this command on ranks of this machine, and the rest of their JSON object."""
    from mlperf_bert.distributed.spawn import run_on_ranks

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "findings.json"
        status = run_on_ranks(
            [*options.command, "--hand-over", str(path)], ranks, agreed_statuses=(FAULT, STOPPED)
        )
        if not path.exists():
            found = f"{ranks} ranks ended with status {status} before they found anything"
            return [fail(name, found, "look at their output above")], {}
        result = json.loads(path.read_text(encoding="utf-8"))
    return from_json(result.pop("checks")), result


def _burn_in(info: "RankInfo | None", seconds: float, options: Options, printer: _Printer) -> int:
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
    printer.show_all(*_on_ranks(options, ranks, _BURN_IN))
    return exit_status(printer.findings)
