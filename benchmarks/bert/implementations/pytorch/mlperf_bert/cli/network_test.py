"""The sub-command `network-test`: the ranks of a job reach each other, or one line says who not.

`doctor --only network` is the same. Without a launcher both start ranks on this machine.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.exit_statuses import FAULT, STOPPED
from mlperf_bert.config.options import add_config
from mlperf_bert.distributed.network_test.findings import (
    NETWORK,
    Finding,
    Options,
    as_json,
    exit_status,
    fail,
    from_json,
    in_short,
)

if TYPE_CHECKING:
    from mlperf_bert.distributed.launch import RankInfo

_CPU_RANKS = 2  # where there are fewer than two GPUs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `network-test`, all of which `doctor` has too."""
    add_config(parser, "of the run to come", required=False)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="for one check, and for a rank to come (default 60)",
    )
    # Ranks that this command started leave their findings there and print nothing.
    parser.add_argument("--hand-over", type=Path, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0, or 1 where something fails. Raises ConfigError for a wrong option."""
    options, info = read_options(args), rank_info()
    printer = Printer(as_json=False, hand_over=args.hand_over)
    if info is not None and info.world_size > 1:
        from mlperf_bert.distributed.network_test.all_ranks import examine

        return examine(info, {}, options, printer.show_all)
    printer.show_all(network_alone(options))
    return exit_status(printer.findings)


class Printer:
    """Prints findings as they come, or all at the end as JSON; ranks hand theirs over."""

    def __init__(self, *, as_json: bool, hand_over: Path | None) -> None:
        self._json = as_json
        self._hand_over = hand_over
        self.findings: list[Finding] = []

    def show(self, findings: Sequence[Finding]) -> None:
        """Print them, where not all are printed at the end."""
        self.findings += findings
        if not self._json and self._hand_over is None:
            for finding in findings:
                print(finding.line(), flush=True)

    def show_all(self, findings: Sequence[Finding], more: dict[str, Any] | None = None) -> None:
        """The last findings, and what else the JSON object holds."""
        self.show(findings)
        result = {**as_json(self.findings), **(more or {})}
        if self._hand_over is not None:
            self._hand_over.write_text(json.dumps(result), encoding="utf-8")
        elif self._json:
            print(json.dumps(result), flush=True)


def read_options(args: argparse.Namespace, data: Path | None = None) -> Options:
    """What `args` ask for. Raises ConfigError for a wrong option, or a config that is wrong."""
    from mlperf_bert.config.files import load_config

    if not (0 < args.timeout <= 3600 and math.isfinite(args.timeout)):
        raise ConfigError("--timeout", f"is {args.timeout:g}", "give seconds, up to 3600")
    if args.set and args.config is None:
        raise ConfigError("--set", "is given without --config", "give a config")
    words = ["--timeout", str(args.timeout)]
    if args.config is not None:
        words += ["--config", str(args.config)]
    for override in args.set:
        words += ["--set", override]
    return Options(
        config=load_config(args.config, args.set) if args.config else None,
        data=data,
        device=args.device,
        timeout_s=args.timeout,
        words=tuple(words),
    )


def rank_info() -> "RankInfo | None":
    """Who this process is; None where torch cannot be imported, which the checks then tell."""
    try:
        import torch  # noqa: F401

        from mlperf_bert.distributed.launch import read_rank_info
    except Exception:
        return None
    return read_rank_info()


def network_alone(options: Options) -> list[Finding]:
    """Start ranks on this machine, which try the network between them."""
    try:
        import torch

        num_gpus = torch.cuda.device_count() if options.wanted_device != "cpu" else 0
        use_gpus = num_gpus >= _CPU_RANKS
        ranks = num_gpus if use_gpus else _CPU_RANKS
        device = "cuda" if use_gpus else "cpu"
        words = ("network-test", *options.words, "--device", device)
        findings, _ = on_ranks(words, ranks, NETWORK)
    except Exception as error:  # torch that cannot be imported, ranks that cannot be started
        return [fail(NETWORK, in_short(error), "mend torch (the check `packages`)")]
    return findings


def on_ranks(words: Sequence[str], ranks: int, name: str) -> tuple[list[Finding], dict[str, Any]]:
    """Findings of a command on ranks of this machine, and the rest of their JSON object."""
    from mlperf_bert.distributed.spawn import run_on_ranks

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "findings.json"
        status = run_on_ranks(
            [*words, "--hand-over", str(path)], ranks, agreed_statuses=(FAULT, STOPPED)
        )
        if not path.exists():
            found = f"{ranks} ranks ended with status {status} before they found anything"
            return [fail(name, found, "look above for what they said")], {}
        result = json.loads(path.read_text(encoding="utf-8"))
    return from_json(result.pop("checks")), result
