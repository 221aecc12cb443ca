"""Away from the checkout: a wheel works, and what `package` exports, which lacks the tools.

Each is installed into an environment that has this one's packages, but not this package.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bert_tools.package.export import export
from mlperf_bert import package_version
from mlperf_bert.__main__ import COMMANDS
from support import PACKAGE, REDUCED, REPOSITORY, TOOLS, run_process

FITS_SYNTHETIC_DATA = (
    "--set model.vocab_size=69 --set data.max_seq_length=32 --set data.max_predictions=5"
    " --set data.masking_rate=0.15"
    " --set parallel.ranks_per_node=1 --set run.max_steps=2 --set run.seed=1"
    " --set eval.target_accuracy=0.001 --set mlperf.enforce_rules=false"
)


def install(source, directory):
    """Build a wheel from a tree and install it into a new environment; its programs are there."""
    call(sys.executable, "-m", "venv", "--without-pip", directory)
    (packages,) = directory.glob("lib/python*/site-packages")
    # Directories named so are searched, but what lies in them does not add others: not the link
    # to the checkout that an editable installation is.
    shared = [path for path in sys.path if path.endswith("-packages")]
    (packages / "shared.pth").write_text("\n".join(shared) + "\n")
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
    call(directory / "bin/python", "-m", "pip", "install", *options, source)
    return directory / "bin"


def call(*command, **environ):
    """The output of a command without this checkout on the path."""
    done = run_process(*command, PYTHONPATH="", CLEAR_CACHES="0", **environ)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_wheel_would_have_every_file():
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in (PACKAGE, TOOLS):
        names = subprocess.check_output(["git", "ls-files", "-z"], cwd=package, text=True)
        files = {package / name for name in names.split("\0")[:-1]}
        code = {file for file in files if file.suffix == ".py"}
        assert code == {file for file in code if file.parent / "__init__.py" in code} != set()
        globs = settings["package-data"][package.name]
        assert files - code <= {file for glob in globs for file in package.glob(glob)}


@pytest.mark.longest
def test_a_wheel_has_all_commands_and_the_configs(synthetic_data, tmp_path):
    parts = ("pyproject.toml", "README.md", "LICENSE", PACKAGE, TOOLS)
    command = ["git", "ls-files", "-z", "--", *map(str, parts)]
    for name in subprocess.check_output(command, cwd=REPOSITORY, text=True).split("\0")[:-1]:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes((REPOSITORY / name).read_bytes())
    wheel = install(tmp_path / "tree", tmp_path / "installed")
    code = "import bert_tools, mlperf_bert; print(bert_tools.__file__, mlperf_bert.__file__)"
    places = call(wheel / "python", "-c", code).split()
    assert all(Path(place).is_relative_to(wheel.parent) for place in places)
    program = wheel / "mlperf_bert"
    assert call(program, "--version").startswith(f"mlperf_bert {package_version()}")
    shown = call(program, "--help")
    assert all(text in shown for _, text in COMMANDS.values())
    assert call(program, "config", "get", "cpu_tiny", "run.max_steps") == "3000\n"
    places = ["--data", str(synthetic_data), "--run-dir", str(tmp_path / "run")]
    call(program, "train", "--config", "cpu_tiny", *places, *FITS_SYNTHETIC_DATA.split())
    assert (tmp_path / "run" / "result_0.txt").is_file()


@pytest.mark.real
def test_the_submission_trains_without_the_tools(tmp_path):
    tree = tmp_path / "tree"
    export(REPOSITORY, REPOSITORY / "results", tree)
    assert not list(tree.rglob("bert_tools"))
    python = str(install(tree, tmp_path / "installed") / "python")
    said = call(tree / "run_and_time.sh", "--", *REDUCED.split(), PYTHON=python)
    assert "RESULT,bert," in said and "accepted" in said
