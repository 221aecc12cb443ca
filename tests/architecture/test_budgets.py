"""Budgets: lines of a file, of a function and of all; what is too complex, ruff says (C901)."""

import ast
import subprocess

import pytest

from support import PACKAGE, REPOSITORY, TOOLS

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS = {  # a run in its order, read from top to bottom
    "train.py": ("train", 275),
    "fine_tune.py": ("fine_tune", 100),
}
MAX_TOTAL_LINES = {"submission": 26_570, "tools": 20_993}  # of .py; tests have a ratio
MAX_TREE_BYTES = 40 * 10**6

FILES = sorted(
    path for folder in (PACKAGE, TOOLS, REPOSITORY / "tests") for path in folder.rglob("*.py")
)


def test_file_and_functions_are_within_budget():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MAX_FILE_LINES, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                name, most = LONG_FUNCTIONS.get(path.relative_to(REPOSITORY).name, ("", 0))
                limit = most if node.name == name else MAX_FUNCTION_LINES
                assert lines <= limit, f"{path}: {node.name} has {lines} lines"


def test_each_package_is_within_budget():
    totals = dict.fromkeys(MAX_TOTAL_LINES, 0)
    for path in tracked("*.py", ":!logs", ":!tests"):
        package = "submission" if path.is_relative_to(PACKAGE) else "tools"
        totals[package] += len(path.read_bytes().splitlines())
    assert all(totals.values())
    assert [
        package for package, lines in totals.items() if lines > MAX_TOTAL_LINES[package]
    ] == [], totals


def test_the_tracked_tree_is_small():
    """It travels whole to a machine with a GPU, and to everyone who clones it."""
    paths = tracked()
    assert len(paths) > 1000
    assert sum(path.lstat().st_size for path in paths) < MAX_TREE_BYTES


def tracked(*patterns):
    """Paths that git knows and that are there."""
    command = ["git", "ls-files", "-z", "--", *patterns]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [REPOSITORY / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.exists()]
