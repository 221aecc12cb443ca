"""A run directory has one owner: who comes second is refused and changes nothing."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from mlperf_bert.errors import ConfigError
from mlperf_bert.run.lock import RunLock
from resume_cases import run_train
from support import refusal, snapshot

OWNER = """
import os, pathlib, sys, time
from mlperf_bert.run.lock import RunLock
with RunLock(pathlib.Path(sys.argv[1]), sys.argv[2]) as lock:
    lock.check()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    sys.stdin.read()
"""


@contextmanager
def owned(root, name="run_0"):
    """Another process that owns a run, until its input ends; and a child of it."""
    command = [sys.executable, "-c", OWNER, str(root), name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as owner:
        child = int(owner.stdout.readline())
        try:
            yield owner, child
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_second_is_refused_and_told_by_whom(tmp_path):
    root = tmp_path / "run"
    with owned(root) as (owner, _):
        before = snapshot(tmp_path)
        with RunLock(root, "run_0") as second, pytest.raises(ConfigError) as refused:
            second.check()
        said = f"process {owner.pid} on host {os.uname().nodename} since "
        assert re.search(rf"{said}\d{{4}}(-\d\d){{2}} \d\d(:\d\d){{2}} UTC', 'wait", str(refused))
        assert snapshot(tmp_path) == before
        with RunLock(root, "run_1") as other:  # of the same directory
            other.check()
    assert list(tmp_path.iterdir()) == []  # the last one to leave takes away what is empty


def test_a_killed_owner_leaves_no_lock_even_where_its_child_lives(tmp_path):
    with owned(tmp_path) as (owner, child):
        owner.kill()
        owner.wait()
        os.kill(child, 0)
        assert (tmp_path / ".run_0.lock").exists()  # the name alone is nothing
        with RunLock(tmp_path, "run_0") as next_one:
            next_one.check()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_taken_away_with_its_owner_is_none(tmp_path, monkeypatch):
    """Who has opened the file just before its owner removes it must not hold a nameless lock."""
    path, lock = tmp_path / ".run_0.lock", RunLock(tmp_path, "run_0")
    locked = lock._locked
    calls = []

    def as_the_owner_leaves(root, where):
        if not calls:
            monkeypatch.setattr(os, "fstat", lambda file: [path.unlink(), real(file)][1])
        else:
            monkeypatch.setattr(os, "fstat", real)
        calls.append(where)
        return locked(root, where)

    real = os.fstat
    monkeypatch.setattr(lock, "_locked", as_the_owner_leaves)
    with lock:
        lock.check()
        assert len(calls) == 2 and path.exists()


@pytest.mark.parametrize("resume", ["none", "auto"])
def test_a_live_run_is_left_as_it_is(tiny_config, synthetic_data, tmp_path, resume, capsys):
    root = tmp_path / "run"
    with owned(root):  # before there is anything else, as a start that came 0.3 s earlier
        assert run_train(tiny_config, synthetic_data, root, resume=resume) == 2
        (root / "run_0/checkpoints/.step_00000001.0badcafe.partial").mkdir(parents=True)
        (root / "run_0/config.toml").touch()
        (root / "result_0.txt").touch()
        before = snapshot(root)
        capsys.readouterr()
        ranks = () if resume == "none" else ("parallel.ranks_per_node=2",)  # none is started
        assert run_train(tiny_config, synthetic_data, root, *ranks, resume=resume) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("mlperf_bert: error: --run-dir: run_0 in ")
        assert snapshot(root) == before


def test_a_run_of_squad_has_one_owner_too(tmp_path, capsys):
    with owned(tmp_path, "squad"):
        before = snapshot(tmp_path)
        command = ["squad", "train", "--device", "cpu", "--run-dir", tmp_path]
        assert refusal(capsys, *command).startswith(
            f"mlperf_bert: error: --run-dir: squad in {tmp_path} is in use by "
        )
        assert snapshot(tmp_path) == before


def test_a_lock_that_is_a_link_is_not_written_into_and_a_bad_place_is_named(tmp_path):
    path, target = tmp_path / ".run_0.lock", tmp_path / "target"
    target.write_text("kept")
    path.symlink_to(target)
    with RunLock(tmp_path, "run_0") as lock, pytest.raises(ConfigError, match="symbolic links"):
        lock.check()
    path.unlink()
    path.hardlink_to(target)
    with RunLock(tmp_path, "run_0") as lock, pytest.raises(ConfigError, match="cannot be created"):
        lock.check()
    assert target.read_text() == "kept"
    with RunLock(target, "run_0") as lock, pytest.raises(ConfigError, match="--run-dir"):
        lock.check()  # no directory can be made there
