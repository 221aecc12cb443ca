"""Where Triton can compile is said as Triton finds it, and nothing is compiled to find out."""

import importlib.util
import sysconfig

import pytest

from mlperf_bert.compiled import why_triton_cannot_compile


def program(path):
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with Triton, Python's headers and no program yet; its directory of programs."""
    found = importlib.util.spec_from_loader("triton", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "include").mkdir()
    (tmp_path / "include/Python.h").touch()
    paths = {"include": str(tmp_path / "include")}
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: paths)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_it_needs_the_package_a_c_compiler_and_the_headers_of_python(
    machine, tmp_path, monkeypatch, name
):
    program(machine / "cc")  # which Triton does not look for
    assert "no C compiler, because neither gcc nor clang" in str(why_triton_cannot_compile())
    program(machine / name)
    assert why_triton_cannot_compile() is None
    (tmp_path / "include/Python.h").unlink()
    assert f"{tmp_path}/include/Python.h is missing" in str(why_triton_cannot_compile())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_triton_cannot_compile() == "triton is not installed"


def test_a_compiler_may_be_named(machine, tmp_path, monkeypatch):
    named = program(tmp_path / "own-cc")
    monkeypatch.setenv("CC", str(named))
    assert why_triton_cannot_compile() is None
    for wrong in (str(tmp_path / "none"), ""):
        monkeypatch.setenv("CC", wrong)
        program(machine / "gcc")  # is not searched for then
        assert f"CC is {wrong!r}, but there is no such" in str(why_triton_cannot_compile())
