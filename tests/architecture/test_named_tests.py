"""Every test, and every commit, that a document names exists."""

import re
import subprocess

import pytest

from support import REPOSITORY

TESTS = REPOSITORY / "tests"
DOCUMENTS = sorted([*(REPOSITORY / "docs").rglob("*.md"), *REPOSITORY.glob("*.md")])
FOLDERS = sorted(path.name for path in TESTS.iterdir() if path.is_dir())
# `unit/test_x.py`, `test_x.py`, `tests/unit`, `unit/package`; a bare `unit` is a plain word.
NAMED = re.compile(rf"(?:tests/)?((?:[\w/]+/)?test_\w+\.py|(?:{'|'.join(FOLDERS)})/[\w/]+)")


def named_tests(document):
    """Paths below `tests` that stand in backticks, in a command or alone."""
    for quoted in re.findall(r"`([^`\n]+)`", document.read_text(encoding="utf-8")):
        for word in quoted.split():
            if match := NAMED.fullmatch(word):
                yield match[1]


def is_there(name):
    return (TESTS / name).exists() if "/" in name else any(TESTS.rglob(name))


def test_every_test_that_a_document_names_exists():
    found = set()
    for document in DOCUMENTS:
        names = list(named_tests(document))
        assert [name for name in names if not is_there(name)] == [], document
        found.update(names)
    assert {"reliability/test_kills.py", "unit/checkpoint/test_resume.py"} <= found
    assert {"test_files.py", "test_readme.py"} <= found and len(found) > 20


def test_commits_that_pages_and_logs_name_exist():
    def git(*words, text=""):
        command = ["git", "-C", str(REPOSITORY), *words]
        return subprocess.run(command, input=text, capture_output=True, text=True).stdout

    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("no history, or a part of it")
    pages = git("grep", "-hoE", r"\b[0-9a-f]{7}\b", "--", "*.md").split()
    logs = re.findall(
        r'"commit": "([0-9a-f]{7,40})\+?"', git("grep", "-h", '"commit"', "--", "*.json*")
    )
    named = {name for name in (*pages, *logs) if not name.isdigit() and not name.isalpha()}
    found = git("cat-file", "--batch-check", text="\n".join(sorted(named))).splitlines()
    assert len(found) == len(named) > 20
    assert [line for line in found if " commit " not in line] == []
