"""The sub-command `report`: its arguments, and what prints."""

import argparse
import json
from pathlib import Path

from mlperf_bert.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `report`."""
    parser.add_argument(
        "run_path", type=Path, metavar="RUN", help="run directory, its run_<i>, or an MLPerf log"
    )
    parser.add_argument(
        "--doctor", action="store_true", help="whether the run is on track, and if not, why"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="of the run: how good a guess is on its held-out set",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; 0 on track, 1 behind or off, 3 cannot be judged.

    Raises ConfigError without --doctor, DataError for files that are missing or wrong.
    """
    from mlperf_bert.data.index import Manifest
    from mlperf_bert.report.doctor import diagnose
    from mlperf_bert.report.run import read_run

    if not args.doctor:
        problem = "only --doctor exists so far"
        raise ConfigError("report", problem, "run: mlperf_bert report --doctor RUN")
    baseline = Manifest.load(args.data / "eval").baseline if args.data else None
    diagnosis = diagnose(read_run(args.run_path), baseline)
    print(json.dumps(diagnosis.as_json()) if args.json else "\n".join(diagnosis.lines()))
    return diagnosis.exit_status
