"""No command takes code from the directory that it is started in, which may be another user's."""

import re
import shlex
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from mlperf_bert.errors import typed
from support import CONFIGS, PACKAGE, REPOSITORY, TOOLS, run_process, write_synthetic_text

IMPLEMENTATION = PACKAGE.parent
COMMAND = Path(sys.executable).with_name("mlperf_bert")
# A module of another user's, in the place of every module that a command might look for here.
PLANTED = """import pathlib
with pathlib.Path({found!r}).open("a") as found:
    found.write(__name__ + "\\n")
raise ImportError("another user's code ran")
"""
# Where a shell or Python starts a Python: what follows its name.
STARTS = re.compile(r"""("\$PYTHON"|sys\.executable,)\s+("?-[a-zA-Z]"?)""")


class Planted:
    """A directory with modules of another user's, each of which writes down that it ran."""

    def __init__(self, directory, found):
        self.directory = directory
        self._found = found
        directory.mkdir()
        for name in {*sys.stdlib_module_names, *packages_distributions()}:
            if name.isidentifier():
                (directory / f"{name}.py").write_text(PLANTED.format(found=str(found)))

    def run(self, *command, **variables):
        """Run a command there; its status, its errors and what ran."""
        words, directory = shlex.join(map(str, command)), shlex.quote(str(self.directory))
        done = run_process("bash", "-c", f"cd {directory} && exec {words}", **variables)
        ran = self._found.read_text().split() if self._found.exists() else []
        return done.returncode, done.stderr, ran


@pytest.fixture
def planted(tmp_path):
    return Planted(tmp_path / "of another user", tmp_path / "found")


def test_a_planted_module_would_be_seen(planted):
    status, _, ran = planted.run(sys.executable, "-m", "mlperf_bert", "--version")
    assert status != 0 and ran


@pytest.mark.longest
def test_processes_that_python_starts_by_itself(planted, tmp_path):
    for name in ("a.txt", "b.txt"):
        write_synthetic_text(tmp_path / name, num_documents=20, seed=1)
    vocabulary = REPOSITORY / "tests/golden/data/own_vocab.txt"
    status, errors, ran = planted.run(
        *(COMMAND, "prepare", "--workers", 2, "--max-seq-length", 64, "--vocab", vocabulary),
        *("--out", tmp_path / "set", "--text", tmp_path / "a.txt", tmp_path / "b.txt"),
    )
    assert (status, ran) == (0, []), errors


def test_a_script_and_what_is_printed_to_be_typed(planted, synthetic_data, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # no script beside the interpreter
    for command in (
        [IMPLEMENTATION / "verify_dataset.sh"],
        ["bash", "-c", typed("config", "show", CONFIGS / "cpu_tiny.toml")],
    ):
        places = {"PYTHON": sys.executable, "DATADIR": str(synthetic_data)}
        status, errors, ran = planted.run(*command, **places)
        assert (status, ran) == (0, []), errors


def test_every_start_of_python_leaves_this_directory_out():
    scripts = [REPOSITORY / "run_and_time.sh", *IMPLEMENTATION.rglob("*.sh")]
    paths = [*scripts, *PACKAGE.rglob("*.py"), *TOOLS.rglob("*.py")]
    starts = [
        first for path in paths for _, first in STARTS.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(starts) >= 10
    assert {first.strip('"') for first in starts} == {"-P"}
