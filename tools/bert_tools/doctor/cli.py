"""The sub-command `doctor`: machine, packages, disk, and one all-reduce between ranks."""

import argparse
import importlib
from typing import TYPE_CHECKING

from bert_tools.doctor.findings import Finding, fail
from mlperf_bert.config.options import add_config
from mlperf_bert.errors import ConfigError, UserError

if TYPE_CHECKING:
    from mlperf_bert.config.run_config import RunConfig

CHECKS = {
    "machine": "machine.check_machine",
    "disk": "machine.check_disk",
    "packages": "packages.check",
    "all-reduce": "cli.check_all_reduce",
}
EXIT_REFUSED = 1  # something fails; schedulers read this
_LEAST_RANKS = 2  # of the all-reduce


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    add_config(parser, "of the run to come", required=False)


def run(args: argparse.Namespace) -> int:
    """Print the findings as they come; 0, or 1 if something fails.

    Raises ConfigError for a wrong option.
    """
    from mlperf_bert.config.files import load_config

    if args.set and args.config is None:
        raise ConfigError("--set", "is given without --config", "give a config")
    config = load_config(args.config, args.set) if args.config else None
    has_failed = False
    for name in CHECKS:
        for finding in _examined(name, config):
            has_failed = has_failed or finding.status == "fail"
            print(finding.line(), flush=True)
    return EXIT_REFUSED if has_failed else 0


def _examined(name: str, config: "RunConfig | None") -> list[Finding]:
    """Make a check; an error is a finding too, and does not stop the others."""
    module, _, function = CHECKS[name].partition(".")
    try:
        # Imported here, so that a missing package fails only its own check.
        found = importlib.import_module(f"bert_tools.doctor.{module}")
        findings: list[Finding] = getattr(found, function)(config)
    except UserError as error:
        where, problem, remedy = error.args
        return [fail(name, f"{where}: {problem}", remedy)]
    except Exception as error:
        return [fail(name, f"{type(error).__name__}: {error}", "fix that, and try again")]
    return findings


def check_all_reduce(config: "RunConfig | None") -> list[Finding]:
    """Start ranks of this machine, which print what they find: the config's, one per GPU, or two.

    Raises ConfigError for more ranks than the machine can hold.
    """
    from bert_tools.common.machine import read_machine
    from mlperf_bert.distributed.spawn import run_on_ranks

    device, ranks = "auto", read_machine().num_gpus
    if config is not None:
        device, ranks = config.run.device, config.parallel.ranks_per_node
    settings = (f"run.device={device}", f"parallel.ranks_per_node={max(ranks, _LEAST_RANKS)}")
    words = [word for setting in settings for word in ("--set", setting)]
    status = run_on_ranks(
        ["network-test", "--config", "cpu_tiny", *words], max(ranks, _LEAST_RANKS)
    )
    if status != 0:
        remedy = "see the error above; without one, look at the package torch"
        return [fail("all-reduce", f"the ranks ended with status {status}", remedy)]
    return []
