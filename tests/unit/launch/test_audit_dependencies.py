"""The dependency audit: which versions an advisory names, and that ours are none of them."""

import importlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version

from support import REPOSITORY

LIST = """# Looked up: 2026-11-22
# a comment
package,introduced,fixed,advisory,what
Some_Package,1.5,2.0.1,CVE-0000-1,something bad
"""


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    return importlib.import_module("audit_dependencies")


@pytest.fixture
def advisories(audit: ModuleType, tmp_path: Path) -> list[Any]:
    path = tmp_path / "advisories.csv"
    path.write_text(LIST)
    return audit.read_advisories(path)


@pytest.mark.parametrize(
    ("version", "is_affected"),
    [("1.4.9", False), ("1.5", True), ("2.0.1rc1", True), ("2.0.1", False), ("10.0", False)],
)
def test_versions_are_compared_as_versions(
    audit: ModuleType, advisories: list[Any], version: str, is_affected: bool
) -> None:
    subject = audit.Subject("some-package", Version(version), "installed")
    other = audit.Subject("other", Version(version), "installed")
    found = audit.findings([subject, other], advisories)
    assert len(found) == is_affected
    if found:
        words = (f"some-package {version} (installed)", "CVE-0000-1", "install 2.0.1 or later")
        assert all(word in found[0] for word in words)


def test_the_lowest_allowed_version_counts(audit: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(
        '[build-system]\nrequires = ["setuptools>=77"]\n'
        '[project]\nname = "mine"\n'
        'dependencies = ["a>=2,<3", "b", "C-c[x]==1.*; python_version>=\'3\'"]\n'
        '[project.optional-dependencies]\ndev = ["mine[gpu]", "d~=1.4"]\n'
    )
    found = {each.package: str(each.version) for each in audit.allowed(path)}
    assert found == {"setuptools": "77", "a": "2", "b": "0", "c-c": "1", "d": "1.4"}


def test_pyproject_allows_nothing_that_the_list_names(audit: ModuleType) -> None:
    advisories = audit.read_advisories(REPOSITORY / "tools" / "advisories.csv")
    assert len(advisories) > 10
    subjects = list(audit.allowed(REPOSITORY / "pyproject.toml"))
    assert {"torch", "h5py", "pytest", "setuptools"} <= {subject.package for subject in subjects}
    assert audit.findings(subjects, advisories) == []
    older = audit.Subject("torch", Version("2.9.1"), "installed")
    assert len(audit.findings([older], advisories)) == 1


def test_nothing_installed_is_named_by_the_list(audit: ModuleType) -> None:
    subjects = list(audit.installed())
    assert {"torch", "h5py", "pytest"} <= {subject.package for subject in subjects}
    assert audit.findings(subjects, audit.read_advisories(audit.ADVISORIES)) == []


@pytest.mark.parametrize(("days", "is_old"), [(0, False), (60, False), (61, True)])
def test_an_old_list_is_a_warning(
    audit: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    days: int,
    is_old: bool,
) -> None:
    path = tmp_path / "advisories.csv"
    day = str(datetime.now(UTC).date() - timedelta(days))
    path.write_text(LIST.replace("2026-11-22", day))
    monkeypatch.setattr(audit, "ADVISORIES", path)
    assert audit.main(["--offline"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert f" advisories of {day}: 0 findings (pip-audit not asked)" in said[-1]
    assert [line.startswith("warning: ") for line in said[:-1]] == [True] * is_old


def test_offline_asks_nobody(audit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask() -> list[str]:
        asked.append("pip-audit")
        return ["a 1.0 (installed): PYSEC-1"]

    monkeypatch.setattr(audit, "ask_pip_audit", ask)
    assert audit.main(["--offline"]) == 0 and asked == []
    assert audit.main([]) == 1 and asked == ["pip-audit"]


def test_what_pip_audit_says_is_read(audit: ModuleType) -> None:
    vulnerable = {"id": "PYSEC-1", "fix_versions": ["1.1", "2.0"], "aliases": [], "description": ""}
    packages = [
        {"name": "a", "version": "1.0", "vulns": [vulnerable]},
        {"name": "b", "version": "1.0", "vulns": []},
        {"name": "own", "skip_reason": "not on the index"},
    ]
    found = audit.findings_of_pip_audit(json.dumps({"dependencies": packages, "fixes": []}))
    assert found == ["a 1.0 (installed): PYSEC-1; install 1.1 or 2.0"]
    skipped = json.dumps({"dependencies": packages[2:], "fixes": []})
    for output in ("", "[]", "{}", skipped):
        with pytest.raises(ValueError):
            audit.findings_of_pip_audit(output)


def test_the_exit_status_says_whether_there_are_findings(
    audit: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "advisories.csv"
    monkeypatch.setattr(audit, "ADVISORIES", path)
    path.write_text(LIST)
    assert audit.main(["--offline"]) == 0
    path.write_text(LIST + "pytest,0,9999,CVE-0000-2,something worse\n")
    assert audit.main(["--offline"]) == 1
    printed = capsys.readouterr().out
    assert "pytest" in printed and "CVE-0000-2" in printed and "9999" in printed
