"""Compiled code comes back only from a directory that nobody but this user can write."""

import os
import pickle
import runpy
import tempfile
from pathlib import Path
from unittest.mock import Mock

import numba
import pytest

from mlperf_bert import compiled
from mlperf_bert.compiled import remove_temporary, set_code_caches
from mlperf_bert.errors import ConfigError
from support import refusal

SOMEBODY = 65534
VARIABLES = ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
PROGRAM = """
from mlperf_bert.compiled import compiled
@compiled
def double(number):
    return 2 * number
print(double.stats.cache_path, double(21))
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes files of another user: root only")


class Poison:
    """A forged numba index: reading it makes a directory."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.makedirs, (str(self.mark), 0o700, True)


@pytest.fixture
def nothing_named(tmp_path, monkeypatch):
    """An empty home."""
    for variable in (*VARIABLES, "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, "")  # and put back afterwards
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def run_program(tmp_path, monkeypatch, capsys):
    """A call that says where a program has its machine code."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")  # put back afterwards
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def run():
        runpy.run_path(str(script))
        where, _, answer = capsys.readouterr().out.strip().rpartition(" ")
        assert answer == "42"
        return where

    return run


@needs_root
def test_what_another_user_has_prepared_is_not_read(nothing_named, run_program, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(nothing_named))
    mark, usual = nothing_named / "came", nothing_named / ".cache/mlperf_bert"
    assert Path(run_program()).is_relative_to(usual / "numba")
    (index,) = usual.rglob("*.nbi")
    index.write_bytes(pickle.dumps(Poison(mark)))
    run_program()
    assert mark.exists()  # so it is what numba reads; in a directory of one's own it may
    mark.rmdir()
    index.write_bytes(pickle.dumps(Poison(mark)))
    for path in (usual, *usual.rglob("*")):
        os.chown(path, SOMEBODY, SOMEBODY)
    for variable in VARIABLES:
        os.environ[variable] = ""
    assert Path(run_program()).is_relative_to(nothing_named / next(nothing_named.glob("mlperf_*")))
    assert not mark.exists()
    remove_temporary()  # of this process only
    assert not list(nothing_named.glob("mlperf_*"))


@pytest.mark.parametrize("is_beside_the_source", [True, False])
def test_nothing_is_kept_beside_the_source(
    tmp_path, run_program, monkeypatch, is_beside_the_source
):
    """There numba looks when it cannot use the directory of the user, and then gives up."""
    (tmp_path / "file").touch()
    unusable = {"NUMBA_CACHE_DIR": tmp_path / "file" / "none"}
    monkeypatch.setattr(compiled, "set_code_caches", lambda: unusable)
    if not is_beside_the_source:
        refuse = Mock(side_effect=PermissionError(13, "Permission denied"))
        monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # with which numba tries to write
    assert run_program() == "None"
    assert not list(tmp_path.rglob("*.nb[ic]"))


def test_a_named_directory_that_others_can_write_is_refused(nothing_named, capsys):
    named = nothing_named / "named"
    named.mkdir()
    os.environ["TRITON_CACHE_DIR"] = str(named)
    problem = f"TRITON_CACHE_DIR: {named} is writable by other users; "
    problem += "set TRITON_CACHE_DIR to a private directory (chmod 700)"
    for mode in (0o777, 0o1777, 0o770):
        named.chmod(mode)
        error = refusal(capsys, "config", "show", "nowhere.toml")
        assert error == f"mlperf_bert: error: {problem}, or unset it\n"
    for mode, umask in ((0o755, 0o002), (0o710, 0o007), (0o701, 0o020)):  # what is made in it
        named.chmod(mode)
        set_code_caches()
        before = os.umask(umask)
        try:
            said = f"umask {umask:03o} lets them change its files; set TRITON_CACHE_DIR to"
            with pytest.raises(ConfigError, match=said):
                set_code_caches()
        finally:
            os.umask(before)


def test_every_compiler_gets_a_directory_of_its_own(nothing_named):
    found = set_code_caches()
    assert found == {name: Path(os.environ[name]) for name in VARIABLES}
    assert len(set(found.values())) == 3
    for path in found.values():
        assert path.parent == nothing_named / ".cache/mlperf_bert"
        assert path.stat().st_mode & 0o777 == 0o700
    assert set_code_caches() == found


def make_unsafe(cache, how):
    cache.parent.mkdir()
    if how == "a link":
        (cache.parent / "other").mkdir()
        cache.symlink_to("other")
    elif how == "writable above":
        cache.parent.chmod(0o777)
    elif how == "a file":
        cache.write_text("")
    elif how == "no home":
        os.environ["HOME"] = __file__
    elif how == "relative":
        os.environ["XDG_CACHE_HOME"] = "caches"
    else:
        cache.mkdir()
        os.chown(cache, SOMEBODY, SOMEBODY)


KINDS = ("a link", "writable above", "a file", "no home", "relative")


@pytest.mark.parametrize("how", [*KINDS, pytest.param("theirs", marks=needs_root)])
def test_what_is_not_safe_is_passed_over(nothing_named, how):
    make_unsafe(nothing_named / ".cache/mlperf_bert", how)
    found = set_code_caches()
    for path in found.values():
        assert path.parent.name.startswith("mlperf_bert-")
        assert not path.is_relative_to(nothing_named / ".cache")
        assert path.parent.stat().st_mode & 0o777 == 0o700
    remove_temporary()
    assert not any(path.parent.exists() for path in found.values())


@needs_root
def test_nobody_else_may_own_what_is_above_though_anybody_may_write_where_it_is_sticky(
    nothing_named,
):
    above = nothing_named / "above"
    above.mkdir()
    os.environ["NUMBA_CACHE_DIR"] = str(above / "mine")
    os.chown(above, SOMEBODY, SOMEBODY)
    for mode in (0o755, 0o1777):
        above.chmod(mode)
        with pytest.raises(ConfigError, match=r"NUMBA_CACHE_DIR: .* which belongs to another user"):
            set_code_caches()
    os.chown(above, 0, 0)
    assert set_code_caches()["NUMBA_CACHE_DIR"] == above / "mine"
