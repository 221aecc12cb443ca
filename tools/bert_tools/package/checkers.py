"""A runner for MLCommons' checkers, which judges a submission tree by the checkers' output.

The checkers' exit statuses are not sufficient. Three of the checkers always exit with 0, one of
them "accepts" a log that does not comply, and all of them skip whatever they do not know. Source:
docs/guides/submission.md.
"""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_tools.package.own_checks import RUNS, Problems
from mlperf_bert.errors import ConfigError, DataError

_BAD = re.compile(
    r"^(ERROR|CRITICAL|Traceback)|Skipping|accepting this|[Bb]ypass|Unknown files|FAIL"
)
_VERDICT = "ERROR - FAILED"  # the compliance checker prints it after warnings with the reason
_LOW_ACCURACY = "WARNING -  Failed checks for eval_accuracy"
_MAX_LINES = 10  # lines that are shown of one checker's complaints
_MAX_CHARS = 200  # characters that are shown of one line


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a checker, and the output that means success.

    `wanted` maps the beginning of an output line to the exact number of lines that must begin with
    it. `status` is the exit status that means success.
    """

    ruleset: str
    checker: str
    subject: str
    arguments: tuple[str, ...]
    wanted: Mapping[str, int]
    status: int = 0


def run_checkers(
    tree: Path, divisions: Mapping[str, str], missed: Collection[str], rulesets: Sequence[str]
) -> tuple[Problems, dict[str, float]]:
    """Run all checkers on copies of a submission tree, which are made next to it.

    Args:
        tree: an exported submission. It is not changed.
        divisions: the division of each system in the tree.
        missed: the logs of runs that missed their target, such as results/x/bert/result_0.txt.
        rulesets: some of `cli.RULESETS`.

    Returns:
        The problems found, and each system's scaling factor, which comes from the reference
        convergence points of the first ruleset.

    Raises ConfigError if mlperf_logging is not installed.
    """
    if importlib.util.find_spec("mlperf_logging") is None:
        remedy = "run tools/venv.sh in the repository"
        raise ConfigError("mlperf_logging", "is not installed", remedy)
    problems: Problems = []
    scaling: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="checked-", dir=tree.parent.absolute()) as scratch:
        for ruleset in rulesets:
            # Each ruleset gets its own copy, because the package checker writes a scaling.json
            # that the next ruleset's check would report as an unknown file.
            copy = Path(scratch) / ruleset
            shutil.copytree(tree, copy)
            for call in _calls(copy, divisions, missed, ruleset):
                problems += _run_checker(call, copy)
            if ruleset == rulesets[0]:
                scaling = {system: scaling_of(copy, system) for system in divisions}
    return problems, scaling


def _run_checker(call: Call, copy: Path) -> Problems:
    """Run a checker on a copy of the tree and return the problems that it reports."""
    # Without -P, modules of the current directory could hide others of the same name.
    command = [sys.executable, "-P", "-W", "ignore", "-m", f"mlperf_logging.{call.checker}"]
    # Relative paths, because the package checker takes characters such as [ for a pattern.
    command += [each.replace(f"{copy.parent}/", "") for each in call.arguments]
    command += ["--log_output", str(copy.with_suffix(".log"))]
    done = subprocess.run(
        command, cwd=copy.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    output = done.stdout.decode("utf-8", errors="replace").replace(f"{copy.name}/", "")
    arguments = " ".join(call.arguments).replace(f"{copy}/", "").replace(str(copy), ".")
    remedy = f"fix it, and check with `python -P -m mlperf_logging.{call.checker} {arguments}`"
    return [
        DataError(call.subject, f"{call.checker} of {call.ruleset} reports: {line}", remedy)
        for line in judge(call, done.returncode, output)
    ]


def judge(call: Call, status: int, output: str) -> tuple[str, ...]:
    """Return the lines in which a checker states why the check failed.

    The result is empty if the check succeeded.
    """
    lines = output.splitlines()
    bad = [line for line in lines if _BAD.search(line) and not line.startswith(tuple(call.wanted))]
    found = {start: sum(line.startswith(start) for line in lines) for start in call.wanted}
    wrong = [start for start, count in call.wanted.items() if found[start] != count]
    if not bad and not wrong and status == call.status:
        return ()
    # Warnings state the reason for a failure. If there is no failure, they do not matter.
    warnings = [line for line in lines if line.startswith("WARNING")]
    reasons = [line for line in (*warnings, *bad) if line != _VERDICT]
    if not reasons:
        reasons = [
            f"{start!r} was printed {found[start]} times, not {call.wanted[start]} times"
            for start in wrong
        ]
    reasons = reasons or [f"it exited with status {status}"]
    return tuple(dict.fromkeys(_one_line(line) for line in reasons))[:_MAX_LINES]


def _one_line(line: str) -> str:
    """Shorten a checker's output line to printable text without its log level."""
    shown = " ".join(line.removeprefix("WARNING -").removeprefix("ERROR -").split())
    return "".join(filter(str.isprintable, shown))[:_MAX_CHARS]


def scaling_of(copy: Path, system: str) -> float:
    """Return the scaling factor that the package checker wrote for a system, or otherwise 1."""
    path = copy / "results" / system / "bert" / "scaling.json"
    return float(json.loads(path.read_text())["scaling_factor"]) if path.exists() else 1.0


def _calls(
    copy: Path, divisions: Mapping[str, str], missed: Collection[str], ruleset: str
) -> list[Call]:
    """Return the calls of all checkers for one ruleset, with the output that means success."""
    closed = sum(division == "closed" for division in divisions.values())
    # In the closed division, the compliance checker rejects a run that missed its target.
    missed = [name for name in missed if divisions[Path(name).parts[1]] == "closed"]
    package = {
        "INFO - PACKAGE CHECKER FOUND NO ERRORS, SUCCESS !": 1,
        f"INFO - Run {RUNS}/{RUNS}": len(divisions),  # the checker also succeeds without logs
        "INFO -  Running Seed Checker": closed,
        "INFO - RCP Test Passed: ": closed,
        "WARNING -  1 file does not comply, accepting this": len(missed),
        _LOW_ACCURACY: len(missed),
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
            if shown in missed:
                success = {"WARNING": 1, _LOW_ACCURACY: 1, _VERDICT: 1}
            status = int(shown in missed)
            calls.append(Call(ruleset, "compliance_checker", shown, arguments, success, status))
    return calls
