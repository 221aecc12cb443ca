"""Optional packages: each command that needs some refuses at once, and says how to install them."""

import ast
import sys
import tomllib

import pytest

import lock
from mlperf_bert import extras
from mlperf_bert.__main__ import main
from mlperf_bert.data.loader import DaliCopy
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.reader_roles import mpi_process
from mlperf_bert.errors import ConfigError
from support import PACKAGE, REPOSITORY, TOOLS

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
GROUPS = PROJECT["optional-dependencies"]
MODULES = {
    "nvidia-dali-cuda130": "nvidia.dali",
    "huggingface-hub": "huggingface_hub",
    "scikit-learn": "sklearn",
    "sentence-transformers": "sentence_transformers",
}
COMMANDS = [  # as typed, the extra, its packages that the command needs
    ("tune --config cpu_tiny --space around --data d --out o", "tune", "optuna"),
    ("squad train --run-dir o", "squad", "tokenizers"),
    ("squad compare --out o", "squad", "tokenizers, matplotlib"),
    ("squad compare --out o", "squad", "matplotlib"),
    ("bench transformers", "transformers", "transformers"),
    ("score model --labelled l.csv --out o", "score", "transformers"),
    ("score model --labelled l.csv --out o", "score", "matplotlib"),
    ("report tensorboard run --out o", "tensorboard", "tensorboard"),
    ("prepare --text a.txt --vocab t.json --out o", "tokenizers", "tokenizers"),
    ("pretrain a.txt --vocab t.json --out o", "tokenizers", "tokenizers"),
    ("pretrain text --out o", "parquet", "pyarrow"),
    ("prepare --corpus text --out o", "parquet", "pyarrow"),
    ("train --config cpu_tiny --data d --run-dir o --set data.loader=dali", "dali", ""),
    ("convert an-owner/a-model --from huggingface --out o", "transformers", "huggingface_hub"),
]


def closure(extra):
    """Names of the packages in an extra and in the extras that it includes."""
    return set(lock.roots(PROJECT, GROUPS[extra]))


def calls():
    """`require_packages` calls of both packages: extra -> names of modules."""
    found = {}
    for path in [*PACKAGE.rglob("*.py"), *TOOLS.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require_packages":
                extra, *modules = (each.value for each in node.args[1:])
                found.setdefault(extra, set()).update(modules)
    return found


def imported():
    """Roots of all modules that both packages import, also by name."""
    found = set()
    for path in [*PACKAGE.rglob("*.py"), *TOOLS.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
            elif isinstance(node, ast.Import):
                found.update(each.name for each in node.names)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
                found.update(each.value for each in node.args if isinstance(each, ast.Constant))
    return found


def hide(monkeypatch, *modules):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current directory with the files that COMMANDS name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.parquet").touch()
    (tmp_path / "a.txt").write_text("Some text.\n")
    (tmp_path / "t.json").write_text('{"model": {}}')
    return tmp_path


def test_an_extra_contains_what_its_commands_check_and_its_size_is_that_of_pyproject():
    lines = (REPOSITORY / "pyproject.toml").read_text().splitlines()
    assert calls().keys() == extras.MEGABYTES.keys() == GROUPS.keys() - {"dev"}
    for extra, modules in calls().items():
        packages = {MODULES.get(package, package) for package in closure(extra)}
        assert modules <= packages, extra
        (line,) = (line for line in lines if line.startswith(f"{extra} = ["))
        assert line.endswith(f"# about {extras.MEGABYTES[extra]} MB")
        assert closure(extra) <= closure("dev")


def test_every_optional_package_that_is_imported_is_checked():
    optional = {MODULES.get(each, each) for extra in extras.MEGABYTES for each in closure(extra)}
    names = {name for name in optional for each in imported() if f"{each}.".startswith(f"{name}.")}
    assert names == set().union(*calls().values())


@pytest.mark.parametrize(("words", "extra", "packages"), COMMANDS)
def test_a_command_refuses_at_once_in_one_line(words, extra, packages, folder, monkeypatch, capsys):
    missing = packages.split(", ") if packages else ["nvidia-dali-cuda130"]
    hide(monkeypatch, *missing, "nvidia.dali")
    missing = [extras._INSTALLED_AS.get(each, each) for each in missing]
    before = sorted(folder.rglob("*"))
    assert main(words.split()) == 2
    said = capsys.readouterr()
    reading = f"pretrain: reading {words.split()[1]}\n"
    assert said.out in ("", reading) and said.err.startswith("mlperf_bert: error: ")
    assert said.err.count("\n") == 1, said.err
    needed = f": needs {' and '.join(missing)}"
    install = extras._typed(extras.install_command(extra, missing))
    size = f"(downloads about {extras.MEGABYTES[extra]} MB)"
    assert needed in said.err and f"installed; run {install} {size}" in said.err
    assert sorted(folder.rglob("*")) == before


def test_ranks_of_a_launcher_are_told_too(monkeypatch):
    hide(monkeypatch, "nvidia.dali", "mpi4py")
    with pytest.raises(ConfigError, match=r"data\.loader: needs nvidia-dali.*use loader 'thread'"):
        DaliCopy("cpu")
    needs = r"data\.loader: needs mpi4py and an MPI library, but it is not installed"
    with pytest.raises(ConfigError, match=needs), mpi_process(RankInfo(0, 2, 0, 2, 0, "mpi")):
        pass


def test_the_command_is_that_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    pip = [sys.executable, "-P", "-m", "pip", "install"]
    command = extras.install_command("tune", ["optuna"])
    assert command == [*pip, "--editable", f"{REPOSITORY}[tune]"]
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "mlperf_bert" / "extras.py"))
    assert extras.install_command("tune", ["optuna"]) == [*pip, "optuna"]


def test_every_requirement_has_its_reason_in_contributing():
    page = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("\n## Requirements\n")[2].partition("\n## ")[0]
    named = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert named == [*map(lock.canonical, PROJECT["dependencies"]), *GROUPS]
