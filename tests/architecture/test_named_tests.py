"""Every test that a document names exists."""

import re
from collections.abc import Iterator
from pathlib import Path

from support import REPOSITORY

TESTS = REPOSITORY / "tests"
DOCUMENTS = sorted([*(REPOSITORY / "docs").rglob("*.md"), *REPOSITORY.glob("*.md")])
FOLDERS = sorted(path.name for path in TESTS.iterdir() if path.is_dir())
# `unit/test_x.py`, `test_x.py`, `tests/unit`, `unit/package`; a bare `unit` is a plain word.
NAMED = re.compile(
    rf"(?:tests/)?((?:[\w/]+/)?(?:test|fuzz)_\w+\.py|(?:{'|'.join(FOLDERS)})/[\w/]+)"
)


def named_tests(document: Path) -> Iterator[str]:
    """Paths below `tests` that stand in backticks, in a command or alone."""
    for quoted in re.findall(r"`([^`\n]+)`", document.read_text(encoding="utf-8")):
        for word in quoted.split():
            if match := NAMED.fullmatch(word):
                yield match[1]


def is_there(name: str) -> bool:
    return (TESTS / name).exists() if "/" in name else any(TESTS.rglob(name))


def test_every_test_that_a_document_names_exists() -> None:
    for document in DOCUMENTS:
        assert [name for name in named_tests(document) if not is_there(name)] == [], document


def test_documents_name_tests() -> None:
    found = set(named_tests(REPOSITORY / "docs" / "reliability.md"))
    assert {"reliability/test_kills.py", "reliability/fuzz"} <= found and len(found) > 20
    assert "test_untrusted.py" in set(named_tests(REPOSITORY / "docs" / "security.md"))
