"""What documents show is there: tables made of the logs' data, commands for a fresh clone."""

from pathlib import Path

import pytest

from support import REPOSITORY, copy_checkout, run_shell

MADE = "<!-- made by: python -c 'print(\"| a |\\n|---|\\n| 1 |\")' -->\n"
TABLE = "| a |\n|---|\n| 1 |\n"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git knows or would take, so nothing that it ignores."""
    return copy_checkout(tmp_path_factory.mktemp("clone") / "tree")


def docs_tables(tree: Path, *words: object) -> tuple[int, str, str]:
    command = f".venv/bin/python tools/docs_tables.py {' '.join(map(str, words))}"
    done = run_shell(command, tree, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_docs_tables_changes_nothing(clone: Path) -> None:
    assert docs_tables(clone, "--check") == (0, "", "")
    assert (REPOSITORY / "docs" / "performance.md").read_text().count("<!-- made by: ") > 0


def test_a_table_is_made_again(clone: Path) -> None:
    page = clone / "page.md"
    page.write_text(f"before\n\n{MADE}| a |\n|---|\n| 2 |\n<!-- end -->\nafter\n")
    line = f"page.md:3: {MADE.partition(': ')[2].removesuffix(' -->' + chr(10))}\n"
    assert docs_tables(clone, "--check", "page.md") == (1, line, "")
    assert "| 2 |" in page.read_text()
    assert docs_tables(clone, "page.md") == (0, line, "")
    assert page.read_text() == f"before\n\n{MADE}{TABLE}<!-- end -->\nafter\n"
    assert docs_tables(clone, "--check", "page.md") == (0, "", "")
    page.unlink()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MADE + TABLE, "page.md:1: no line `<!-- end -->` follows"),
        (MADE + MADE + TABLE + "<!-- end -->\n", "page.md:1: no `<!-- end -->` before"),
        ("<!-- made by: python lost.py -->\n<!-- end -->\n", "No such file"),
        ("<!-- made by: nothing_such -->\n<!-- end -->\n", "nothing_such"),
        ("<!-- made by: true -->\n<!-- end -->\n", "prints nothing"),
    ],
)
def test_what_cannot_be_made_changes_no_page(clone: Path, text: str, said: str) -> None:
    page = clone / "page.md"
    page.write_text(text)
    status, printed, error = docs_tables(clone, "page.md")
    assert (status, printed, error.count("\n")) == (2, "", 1) and said in error
    assert page.read_text() == text
    page.unlink()
