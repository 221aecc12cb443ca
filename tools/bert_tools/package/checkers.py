"""Runs MLCommons' checkers on a tree, and judges by their words only.

Exit codes say little: three of the checkers always exit with 0, one "accepts" a log that does not
comply, and all skip what they do not know (docs/guides/submission.md).
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_tools.package.own_checks import RUNS, Problems
from mlperf_bert.errors import ConfigError, DataError

_BAD = re.compile(
    r"^(ERROR|CRITICAL|Traceback)|Skipping|accepting this|[Bb]ypass|Unknown files|FAIL"
)
_VERDICT = "ERROR - FAILED"  # from the compliance checker, after warnings with the reason
_MOST_LINES = 10  # shown of a checker's complaints
_MOST_SHOWN = 200  # characters of a line


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a checker. `wanted`: exact number of lines with each beginning."""

    ruleset: str
    checker: str
    subject: str
    arguments: tuple[str, ...]
    wanted: Mapping[str, int]


def run_checkers(
    tree: Path, divisions: Mapping[str, str], rulesets: Sequence[str]
) -> tuple[Problems, dict[str, float]]:
    """Run all checkers on copies of a tree.

    Args:
        tree: an exported submission; it is not changed.
        divisions: division of each system in it.
        rulesets: some of `cli.RULESETS`.

    Returns:
        The problems found, and each system's scaling factor by the first ruleset's reference
        convergence points.

    Raises ConfigError if mlperf_logging is missing.
    """
    if importlib.util.find_spec("mlperf_logging") is None:
        remedy = "run in the checkout: tools/venv.sh"
        raise ConfigError("mlperf_logging", "is not installed", remedy)
    problems: Problems = []
    scaling: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="package-") as scratch:
        for ruleset in rulesets:
            # A copy for each: the package checker writes scaling.json, which the next would not
            # know.
            copy = Path(scratch) / ruleset
            shutil.copytree(tree, copy)
            for call in _calls(copy, divisions, ruleset):
                problems += _ask(call, copy)
            if ruleset == rulesets[0]:
                scaling = {system: scaling_of(copy, system) for system in divisions}
    return problems, scaling


def _ask(call: Call, copy: Path) -> Problems:
    """Run a checker; what it says against its success."""
    # -P: this package's modules must not hide others of their names.
    command = [sys.executable, "-P", "-W", "ignore", "-m", f"mlperf_logging.{call.checker}"]
    command += [*call.arguments, "--log_output", str(copy.with_suffix(".log"))]
    done = subprocess.run(
        command, cwd=copy.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    output = done.stdout.decode("utf-8", errors="replace").replace(f"{copy}/", "")
    arguments = " ".join(call.arguments).replace(f"{copy}/", "").replace(str(copy), ".")
    remedy = f"mend it and ask: python -P -m mlperf_logging.{call.checker} {arguments}"
    return [
        DataError(call.subject, f"{call.checker} of {call.ruleset} says: {line}", remedy)
        for line in judge(call, done.returncode, output)
    ]


def judge(call: Call, status: int, output: str) -> tuple[str, ...]:
    """Reasons against a checker's success, in its own words; none if it succeeded."""
    lines = output.splitlines()
    bad = [line for line in lines if _BAD.search(line)]
    found = {start: sum(line.startswith(start) for line in lines) for start in call.wanted}
    wrong = [start for start, count in call.wanted.items() if found[start] != count]
    if not bad and not wrong and status == 0:
        return ()
    # A warning gives the reason of a failure; alone it means nothing.
    reasons = [line for line in lines if line.startswith("WARNING")]
    said = [line for line in (*reasons, *bad) if line != _VERDICT]
    if not said:
        said = [f"says {start!r} {found[start]} times" for start in wrong]
    said = said or [f"ends with status {status}"]
    return tuple(dict.fromkeys(_one_line(line) for line in said))[:_MOST_LINES]


def _one_line(line: str) -> str:
    shown = " ".join(line.removeprefix("WARNING -").removeprefix("ERROR -").split())
    return "".join(filter(str.isprintable, shown))[:_MOST_SHOWN]


def scaling_of(copy: Path, system: str) -> float:
    """The factor that the package checker left for a closed result; 1 if it left none."""
    path = copy / "results" / system / "bert" / "scaling.json"
    return float(json.loads(path.read_text())["scaling_factor"]) if path.exists() else 1.0


def _calls(copy: Path, divisions: Mapping[str, str], ruleset: str) -> list[Call]:
    closed = sum(division == "closed" for division in divisions.values())
    package = {
        "INFO - PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !": 1,
        f"INFO - Run {RUNS}/{RUNS}": len(divisions),  # success without a log read is worth nothing
        "INFO -  Running Seed Checker": closed,
        "INFO - RCP Test Passed: ": closed,
    }
    whole = (str(copy), "training", ruleset)
    passed = {"INFO - ALL CHECKS PASSED.": 1}
    calls = [
        Call(ruleset, "package_checker", "the package", whole, package),
        Call(ruleset, "repo_checker", "the package", whole, passed),
    ]
    for system in divisions:
        name = f"systems/{system}.json"
        passed = {"INFO -   System description checker passed for ": 1}
        arguments: tuple[str, ...] = (str(copy / name), "training", ruleset)
        calls.append(Call(ruleset, "system_desc_checker", name, arguments, passed))
        for log in sorted((copy / "results" / system / "bert").glob("*")):
            arguments = ("--usage", "training", "--ruleset", ruleset, str(log))
            shown = str(log.relative_to(copy))
            success = {"INFO - SUCCESS": 1}
            calls.append(Call(ruleset, "compliance_checker", shown, arguments, success))
    return calls
