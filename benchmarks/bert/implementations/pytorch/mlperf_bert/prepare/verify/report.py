"""The sub-command `verify` and its report: checks with their problems, and statistics.

Heavy imports wait until the command runs.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlperf_bert.common.errors import DataError, one_line
from mlperf_bert.common.machine import usable_cpus

SCHEMA_VERSION = 2
MAX_PROBLEM_LINES = 20
HISTOGRAM_ROWS = 10
BAR_WIDTH = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `verify`."""
    parser.add_argument(
        "dir", type=Path, metavar="DIR", help="prepared set, or directory with train/ and eval/"
    )
    parser.add_argument(
        "--full", action="store_true", help="read every shard: digests, structure, contents"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="with --full: worker processes (default: the cores of this process)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report; returns 0.

    Raises DataError if a check failed, ConfigError for a wrong option.
    """
    from mlperf_bert.prepare.verify.check import verify

    workers = len(usable_cpus()) if args.workers is None else args.workers
    report = verify(args.dir, full=args.full, workers=workers)
    print(report.to_json() if args.json else report.to_text(), flush=True)
    report.raise_if_wrong()
    return 0


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table: a check and all its problems.

    `was_made` is false if there was nothing to check, or an earlier failure hid a part of it.
    """

    name: str
    summary: str
    problems: tuple[DataError, ...] = ()
    was_made: bool = True

    @property
    def status(self) -> str:
        """`ok`, `WRONG` or `skipped`."""
        if not self.was_made:
            return "skipped"
        return "WRONG" if self.problems else "ok"


@dataclass(frozen=True, slots=True)
class SetReport:
    """The checks of one prepared set, or of a pair, and the statistics of the set."""

    name: str
    checks: tuple[Check, ...]
    statistics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """The report of all sets."""

    directory: Path
    mode: str
    sets: tuple[SetReport, ...]

    def problems(self) -> list[DataError]:
        """All problems, in the order of the checks."""
        return [
            problem for part in self.sets for check in part.checks for problem in check.problems
        ]

    def raise_if_wrong(self) -> None:
        """Raise a DataError that counts the failed checks and names the first problem."""
        checks = [check for part in self.sets for check in part.checks if check.was_made]
        failed = sum(check.status == "WRONG" for check in checks)
        if failed:
            where, problem, remedy = (one_line(text) for text in self.problems()[0].args)
            summary = f"{failed} of {len(checks)} checks failed, the first: {where}: {problem}"
            raise DataError(one_line(str(self.directory)), summary, remedy)

    def to_text(self) -> str:
        """The table, the problems (the first twenty), the statistics."""
        lines = [f"{one_line(str(self.directory))}, {self.mode} check"]
        for part in self.sets:
            lines += ["", f"{part.name}:"]
            for check in part.checks:
                line = f"{check.status:<8}{check.name:<20}{one_line(check.summary)}"
                lines.append(line.rstrip())
        problems = self.problems()
        if problems:
            lines += ["", "problems:"]
            lines += [one_line(str(problem)) for problem in problems[:MAX_PROBLEM_LINES]]
            if len(problems) > MAX_PROBLEM_LINES:
                lines.append(f"and {len(problems) - MAX_PROBLEM_LINES} more")
        for part in self.sets:
            if part.statistics:
                lines += ["", *_statistics_lines(part.name, part.statistics)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as one object; a schema version only ever gains keys."""
        sets = {
            part.name: {
                "checks": [_check_values(check) for check in part.checks],
                "statistics": part.statistics,
            }
            for part in self.sets
        }
        values = {
            "schema_version": SCHEMA_VERSION,
            "directory": str(self.directory),
            "mode": self.mode,
            "is_right": not self.problems(),
            "sets": sets,
        }
        return json.dumps(values)


def length_statistics(histogram: tuple[int, ...]) -> dict[str, Any]:
    """Mean and median of the lengths, and the histogram itself (index: tokens)."""
    num_samples = sum(histogram)
    num_tokens = sum(length * count for length, count in enumerate(histogram))
    seen = 0
    median = 0
    for length, count in enumerate(histogram):
        seen += count
        if 2 * seen >= num_samples:
            median = length
            break
    return {
        "samples": num_samples,
        "tokens": num_tokens,
        "mean_length": num_tokens / num_samples,
        "median_length": median,
        "length_histogram": list(histogram),
    }


def _check_values(check: Check) -> dict[str, Any]:
    problems = [
        dict(zip(("where", "problem", "remedy"), problem.args, strict=True))
        for problem in check.problems
    ]
    return {
        "name": check.name,
        "status": check.status,
        "summary": check.summary,
        "problems": problems,
    }


def _statistics_lines(name: str, statistics: dict[str, Any]) -> list[str]:
    lines = [
        f"{name}: {statistics['samples']:,} examples of {statistics['tokens']:,} tokens, "
        f"mean length {statistics['mean_length']:.1f}, median {statistics['median_length']}"
    ]
    counts = statistics["length_histogram"][1:]
    step = -(-len(counts) // HISTOGRAM_ROWS)
    rows = [sum(counts[first : first + step]) for first in range(0, len(counts), step)]
    most = max(1, *rows)
    width = len(str(len(counts)))
    for number, row in enumerate(rows):
        first = number * step + 1
        last = min(first + step - 1, len(counts))
        bar = "#" * round(BAR_WIDTH * row / most)
        lines.append(f"  {first:>{width}} .. {last:>{width}} {row:>13,}  {bar}".rstrip())
    return lines
