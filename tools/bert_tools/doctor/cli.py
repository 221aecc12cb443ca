"""The sub-command `doctor`: machine, packages, disk, and one all-reduce between ranks."""

import argparse
from typing import TYPE_CHECKING

from bert_tools.doctor import checks
from mlperf_bert.config.options import add_config
from mlperf_bert.errors import ConfigError, UserError

if TYPE_CHECKING:
    from mlperf_bert.config.run_config import RunConfig

CHECKS = {
    "machine": "check_machine",
    "disk": "check_disk",
    "packages": "check_packages",
    "all-reduce": "check_all_reduce",
}
EXIT_REFUSED = 1  # something fails; schedulers read this


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


def _examined(name: str, config: "RunConfig | None") -> list[checks.Finding]:
    """Make a check; an error is a finding too, and does not stop the others."""
    try:
        findings: list[checks.Finding] = getattr(checks, CHECKS[name])(config)
    except UserError as error:
        where, problem, remedy = error.args
        return [checks.fail(name, f"{where}: {problem}", remedy)]
    except Exception as error:
        return [checks.fail(name, f"{type(error).__name__}: {error}", "fix that, and try again")]
    return findings
