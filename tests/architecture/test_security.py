"""No file of the package runs code out of data or starts a shell (docs/reference/security.md)."""

import ast
import re
import subprocess
from pathlib import Path

from support import PACKAGE, REPOSITORY, TOOLS

PIP_INSTALL = r"\bpip3? .*install\b"


def names_a_package(line):
    """True if a word after `pip install` is no option, path of the checkout or variable."""
    words = re.split(PIP_INSTALL, line, maxsplit=1)[-1].partition("`")[0].split()
    return any(re.match(r"['\"]?\w", word) for word in words)


def unsafe(code):
    """Unsafe calls without a ruff rule: code builtins, pickled arrays, a variable `shell`."""
    if not any(word in code for word in ("compile(", "__import__", "allow_pickle", "shell=")):
        return []
    found = []
    for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in ("compile", "__import__"):
            found.append(call.func.id)
        for keyword in call.keywords:
            is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg in ("shell", "allow_pickle") and not is_off:
                found.append(keyword.arg)
    return found


def test_no_data_becomes_code():
    """By the ways that ruff has no rule for; the others stand in pyproject.toml."""
    for path in [*PACKAGE.rglob("*.py"), *TOOLS.rglob("*.py")]:
        assert unsafe(path.read_text(encoding="utf-8")) == [], path
    assert len(unsafe("compile(x); __import__(x); load(x, allow_pickle=y); run(x, shell=y)")) == 4
    assert unsafe("re.compile(x); run(x, shell=False)") == []


def test_no_line_says_to_install_a_name():
    """Only from the checkout: the name mlperf-bert on the index is not ours, others are locked."""
    here = Path(__file__).relative_to(REPOSITORY)
    but = [f":!{path}" for path in ("logs", "logs/README.md", here)]
    command = ["git", "grep", "-nIE", PIP_INSTALL, "--", ".", *but]
    lines = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout
    assert lines.count("\n") >= 4  # of tools/venv.sh and the Dockerfile
    assert [line for line in lines.splitlines() if names_a_package(line)] == []
    assert names_a_package("run: pip install 'mlperf-bert[tune]'")


def test_the_container_does_not_run_as_root():
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users and users[-1].isdecimal() and int(users[-1]) >= 1000
    after = lines[lines.index(f"USER {users[-1]}") :]
    assert not [line for line in after if line.startswith(("RUN", "COPY", "ADD"))]
