"""Budgets: 600 lines a file, 60 a function (complexity 10 is ruff's C901), 40 MB in all."""

import ast
import subprocess
from pathlib import Path

import pytest

from support import PACKAGE, REPOSITORY, TOOLS

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_TREE_BYTES = 40 * 10**6
EXCEPTIONS: dict[str, str] = {}  # path -> reason; at most three

FILES = sorted(
    path for folder in (PACKAGE, TOOLS, REPOSITORY / "tests") for path in folder.rglob("*.py")
)


def name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_file_and_functions_are_within_budget(path: Path) -> None:
    if name(path) in EXCEPTIONS:
        pytest.skip(EXCEPTIONS[name(path)])
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_exceptions_are_few_and_real() -> None:
    assert len(EXCEPTIONS) <= 3
    assert all((REPOSITORY / path).is_file() for path in EXCEPTIONS)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_first_line_says_the_job(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not path.is_relative_to(REPOSITORY / "tests"):
        assert docstring and docstring.splitlines()[0].endswith((".", ":"))


def test_the_tracked_tree_is_small() -> None:
    """It travels whole to a machine with a GPU, and to everyone who clones it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [REPOSITORY / name for name in listed.stdout.decode().split("\0") if name]
    assert len(paths) > 1000
    assert sum(path.lstat().st_size for path in paths if path.exists()) < MAX_TREE_BYTES
