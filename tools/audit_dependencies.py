"""Known vulnerabilities of installed packages, and of the lowest versions pyproject.toml allows.

    python tools/audit_dependencies.py [--offline]

Compares with `advisories.csv` beside it, and warns if that is old; also asks pip-audit if it
reaches its database, but not with --offline. One line per finding, and status 1 if there are any.
"""

import argparse
import csv
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ADVISORIES = Path(__file__).with_name("advisories.csv")
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
LOOKED_UP = "# Looked up: "
STALE_DAYS = 60
PATIENCE_S = 300
ANY = Version("0")


@dataclass(frozen=True, slots=True)
class Advisory:
    """Versions of `introduced` and up, below `fixed`, are affected."""

    package: str
    introduced: Version
    fixed: Version
    name: str
    what: str


@dataclass(frozen=True, slots=True)
class Subject:
    """A version of a package, and where it comes from: "installed", or the file that allows it."""

    package: str
    version: Version
    where: str


def looked_up(path: Path) -> date:
    """The day of the offline list, from its first line."""
    first = path.read_text("utf-8").partition("\n")[0]
    return date.fromisoformat(first.removeprefix(LOOKED_UP))


def read_advisories(path: Path) -> list[Advisory]:
    """Read the offline list; lines that begin with # are comments."""
    lines = (line for line in path.read_text("utf-8").splitlines() if not line.startswith("#"))
    return [
        Advisory(
            canonicalize_name(row["package"]),
            Version(row["introduced"]),
            Version(row["fixed"]),
            row["advisory"],
            row["what"],
        )
        for row in csv.DictReader(lines)
    ]


def installed() -> Iterator[Subject]:
    """Every package of this environment."""
    for found in distributions():
        yield Subject(canonicalize_name(found.name), Version(found.version), "installed")


def allowed(pyproject: Path) -> Iterator[Subject]:
    """The lowest version of each requirement; 0 if it has no lower bound."""
    tables: dict[str, Any] = tomllib.loads(pyproject.read_text("utf-8"))
    project = tables.get("project", {})
    groups = [tables.get("build-system", {}).get("requires", []), project.get("dependencies", [])]
    groups += project.get("optional-dependencies", {}).values()
    for text in (text for group in groups for text in group):
        requirement = Requirement(text)
        bounds = [
            Version(each.version.removesuffix(".*"))
            for each in requirement.specifier
            if each.operator in (">=", "==", "~=", ">")
        ]
        package = canonicalize_name(requirement.name)
        if package != canonicalize_name(project.get("name", "")):  # its own extras
            yield Subject(package, max(bounds, default=ANY), f"allowed by {pyproject.name}")


def findings(subjects: Iterable[Subject], advisories: Iterable[Advisory]) -> list[str]:
    """One line for each advisory that applies."""
    by_package: dict[str, list[Advisory]] = {}
    for advisory in advisories:
        by_package.setdefault(advisory.package, []).append(advisory)
    return [
        f"{subject.package} {subject.version} ({subject.where}): {advisory.name}, "
        f"{advisory.what}; {_remedy(subject)} {advisory.fixed} or later"
        for subject in subjects
        for advisory in by_package.get(subject.package, [])
        if advisory.introduced <= subject.version < advisory.fixed
    ]


def findings_of_pip_audit(output: str) -> list[str]:
    """Findings from pip-audit's JSON. Raises ValueError if it is invalid or has no package."""
    report = json.loads(output)
    if not isinstance(report, dict) or "dependencies" not in report:
        raise ValueError("is no report")
    known = [package for package in report["dependencies"] if "skip_reason" not in package]
    if not known:  # its database was not reached, which its exit status does not show
        raise ValueError("knows no package")
    return [
        f"{package['name']} {package['version']} (installed): {found['id']}; install "
        f"{' or '.join(found['fix_versions']) or 'another package: no version has it mended'}"
        for package in known
        for found in package["vulns"]
    ]


def ask_pip_audit() -> list[str] | None:
    """Findings of pip-audit; None if it reaches no database."""
    command = [sys.executable, "-P", "-m", "pip_audit"]
    command += ["--format", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        return findings_of_pip_audit(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; 1 if there are any."""
    parser = argparse.ArgumentParser(description="Look for known vulnerabilities of packages.")
    parser.add_argument("--offline", action="store_true", help="do not ask pip-audit")
    is_offline = parser.parse_args(arguments).offline
    advisories, day = read_advisories(ADVISORIES), looked_up(ADVISORIES)
    age = (datetime.now(UTC).date() - day).days
    if age > STALE_DAYS:
        what = f"{ADVISORIES.name} was looked up on {day}, {age} days ago"
        print(f"warning: {what}; look its packages up again and change its date", file=sys.stderr)
    subjects = [*installed(), *allowed(PYPROJECT)]
    lines = findings(subjects, advisories)
    asked = None if is_offline else ask_pip_audit()
    lines += asked or []
    for line in lines:
        print(line)
    answer = "no database reached" if asked is None else f"{len(asked)} findings"
    told = "pip-audit not asked" if is_offline else f"pip-audit: {answer}"
    print(
        f"{len(subjects)} versions against {len(advisories)} advisories of {day}: "
        f"{len(lines)} findings ({told})",
        file=sys.stderr,
    )
    return 1 if lines else 0


def _remedy(subject: Subject) -> str:
    return "install" if subject.where == "installed" else "require"


if __name__ == "__main__":
    sys.exit(main())
