"""What no file of the package may do: run code out of data, or start a shell; docs/security.md."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import PACKAGE, REPOSITORY, TOOLS

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__"}
UNSAFE_CALLS = {"os.system", "os.popen", "torch.load", "torch.save", "pickle.load", "pickle.loads"}
# torch's collectives of objects unpickle what comes.
UNSAFE_METHODS = {"all_gather_object", "gather_object", "broadcast_object_list"} | {
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}

# Whoever catches what numba's own cache, a directory of the user's, may raise: loads nothing.
NAMES_AN_ERROR_OF_PICKLE = {"mlperf_bert/common/compiled.py"}

PIP_INSTALL = r"\bpip3? .*install\b"

FILES = sorted([*PACKAGE.rglob("*.py"), *TOOLS.rglob("*.py")])


def names_a_package(line: str) -> bool:
    """Whether a word after `pip install` is no option, and none of the checkout or a variable."""
    words = re.split(PIP_INSTALL, line, maxsplit=1)[-1].partition("`")[0].split()
    return any(re.match(r"['\"]?\w", word) for word in words)


def relative(path: Path) -> str:
    return path.relative_to((TOOLS if path.is_relative_to(TOOLS) else PACKAGE).parent).as_posix()


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def is_true(call: ast.Call, keyword: str) -> bool:
    """Whether a call has the keyword, with anything but False written there."""
    values = [each.value for each in call.keywords if each.arg == keyword]
    return any(not (isinstance(value, ast.Constant) and not value.value) for value in values)


def unsafe(tree: ast.AST) -> Iterator[str]:
    """What a file does that data could use."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = {alias.name.split(".")[0] for alias in node.names}
            yield from (f"import {name}" for name in modules & UNSAFE_MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (f"import {name}" for name in {module} & UNSAFE_MODULES)
            yield from (f"import {name}" for name in names & UNSAFE_CALLS)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in UNSAFE_NAMES | UNSAFE_CALLS or name.rpartition(".")[2] in UNSAFE_METHODS:
                yield f"call {name}"
            yield from (word for word in ("shell", "allow_pickle") if is_true(node, word))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_data_becomes_code(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    expected = ["import pickle"] if relative(path) in NAMES_AN_ERROR_OF_PICKLE else []
    assert list(unsafe(tree)) == expected
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used &= {"load", "loads", "dump", "dumps", "Unpickler", "Pickler"}
    assert not expected or not used


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "eval('1')",
        "torch.load(path, weights_only=True)",
        "numpy.load(path, allow_pickle=True)",
        "numpy.load(path, allow_pickle=answer)",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "dist.all_gather_object(values, value)",
    ],
)
def test_it_would_be_seen(code: str) -> None:
    assert list(unsafe(ast.parse(code)))


@pytest.mark.parametrize("code", ["model.eval()", "json.load(f)", "subprocess.run(x, shell=False)"])
def test_what_is_harmless_is_not_named(code: str) -> None:
    assert not list(unsafe(ast.parse(code)))


def test_the_exceptions_are_real() -> None:
    for name in NAMES_AN_ERROR_OF_PICKLE:
        assert "pickle.UnpicklingError" in (PACKAGE.parent / name).read_text()


def test_no_line_says_to_install_a_name() -> None:
    """Only from the checkout: the name mlperf-bert on the index is not ours, others are locked."""
    here = Path(__file__).relative_to(REPOSITORY)
    but = [f":!{path}" for path in ("logs", "docs/log.md", here)]
    command = ["git", "grep", "-nIE", PIP_INSTALL, "--", ".", *but]
    lines = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout
    assert lines.count("\n") >= 4  # of tools/venv.sh and the Dockerfile
    told = [line for line in lines.splitlines() if names_a_package(line)]
    assert told == []


@pytest.mark.parametrize(
    ("line", "names_one"),
    [
        ("run: pip install 'mlperf-bert[tune]'", True),
        ("`pip3 install -U mlperf-logging`", True),
        ("`pip install --no-deps tokenizers`, or", True),
        ("python -m pip install -e '.[tune]'", False),
        ("pip install --editable .", False),
        ('pip install --quiet "$@"', False),
        ("as `pip install` does", False),
    ],
)
def test_what_names_a_package(line: str, names_one: bool) -> None:
    assert names_a_package(line) is names_one


def test_the_container_does_not_run_as_root() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users and users[-1].isdecimal() and int(users[-1]) >= 1000
    after = lines[lines.index(f"USER {users[-1]}") :]
    assert not [line for line in after if line.startswith(("RUN", "COPY", "ADD"))]
