"""The dependency audit: which versions an advisory names, and that ours are none of them."""

import importlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

from support import REPOSITORY

LIST = """# Looked up: 2026-11-22
# a comment
package,introduced,fixed,advisory,what
Some_Package,1.5,2.0.1,CVE-0000-1,something bad
"""


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, with a list of one advisory."""
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    module = importlib.import_module("audit_dependencies")
    monkeypatch.setattr(module, "ADVISORIES", tmp_path / "advisories.csv")
    (tmp_path / "advisories.csv").write_text(LIST)
    return module


def test_versions_are_compared_as_versions(audit: ModuleType) -> None:
    advisories = audit.read_advisories(audit.ADVISORIES)
    affected = {"1.4.9": 0, "1.5": 1, "2.0.1rc1": 1, "2.0.1": 0, "10.0": 0}
    for version, number in affected.items():
        subject = audit.Subject("some-package", Version(version), "installed")
        other = audit.Subject("other", Version(version), "installed")
        found = audit.findings([subject, other], advisories)
        assert len(found) == number
        words = (f"some-package {version} (installed)", "CVE-0000-1", "install 2.0.1 or later")
        assert all(word in line for line in found for word in words)


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


def test_the_list_names_nothing_that_pyproject_allows_or_that_is_installed(
    audit: ModuleType,
) -> None:
    advisories = audit.read_advisories(REPOSITORY / "tools" / "advisories.csv")
    assert len(advisories) > 10
    for subjects in (list(audit.allowed(REPOSITORY / "pyproject.toml")), list(audit.installed())):
        assert {"torch", "h5py", "pytest", "setuptools"} <= {each.package for each in subjects}
        assert audit.findings(subjects, advisories) == []
    older = audit.Subject("torch", Version("2.9.1"), "installed")
    assert len(audit.findings([older], advisories)) == 1


def test_an_old_list_is_a_warning(audit: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for days, is_old in ((0, False), (60, False), (61, True)):
        day = str(datetime.now(UTC).date() - timedelta(days))
        audit.ADVISORIES.write_text(LIST.replace("2026-11-22", day))
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
    audit: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main(["--offline"]) == 0
    audit.ADVISORIES.write_text(LIST + "pytest,0,9999,CVE-0000-2,something worse\n")
    assert audit.main(["--offline"]) == 1
    printed = capsys.readouterr().out
    assert "pytest" in printed and "CVE-0000-2" in printed and "9999" in printed
