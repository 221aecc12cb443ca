"""The machine around the program: other packages on PYTHONPATH, and locales of one byte."""

import sys

import pytest

from mlperf_bert.__main__ import _in_one_line
from mlperf_bert.extras import shadowed_packages
from support import run_cli


@pytest.fixture
def module(tmp_path, monkeypatch):
    """PYTHONPATH as a cluster's module sets it, with a numpy that cannot be imported."""
    (tmp_path / "module" / "numpy").mkdir(parents=True)
    text = 'raise ImportError("numpy 1.21 of another Python")\n'
    (tmp_path / "module" / "numpy" / "__init__.py").write_text(text)
    return str(tmp_path / "module")


def path_with(module):
    return ":".join([module, *filter(None, map(str, sys.path))])


def test_packages_of_other_directories_are_found(module, tmp_path):
    (tmp_path / "torch.py").touch()
    (tmp_path / "nowhere_else.py").touch()
    (tmp_path / "numpy").touch()  # a program, no package
    environ = {"PYTHONPATH": f"{module}:{tmp_path}/lost::{tmp_path}:{sys.prefix}/lib"}
    assert shadowed_packages(environ) == [(module, "numpy"), (str(tmp_path), "torch")]
    assert shadowed_packages({}) == []


def test_a_package_that_counts_before_ours_is_named(module, synthetic_data, tmp_path):
    done = run_cli("verify", synthetic_data, PYTHONPATH=path_with(module))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"PYTHONPATH: Python imports numpy from {module} (numpy 1.21" in done.stderr


def test_a_fault_of_ours_is_not_blamed_on_it(module, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", module)
    assert (
        _in_one_line(ImportError("cannot import name 'x'", name="bert_tools.y"), ["plan"]) is None
    )
    assert "numpy from" in _in_one_line(ImportError("no x", name="numpy.x"), ["plan"])


def test_doctor_names_it(module):
    done = run_cli("doctor", PYTHONPATH=path_with(module))
    line = next(line for line in done.stdout.splitlines() if "packages.numpy" in line)
    assert line.startswith("fail") and module in line and "unset PYTHONPATH" in line


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1251", "koi8-r"])
def test_a_locale_of_one_byte_ends_in_no_traceback(tmp_path, encoding):
    (tmp_path / "Größe-река").mkdir()
    surroundings = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C"}
    for name in ("Größe-река", "Größe-нет"):
        done = run_cli("verify", tmp_path / name, **surroundings)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert done.stderr.startswith("mlperf_bert: error: ")
