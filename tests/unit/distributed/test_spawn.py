"""Ranks of this machine: who is named as the first cause, how they end, and that none is left."""

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from mlperf_bert.distributed import signal_watch, spawn
from mlperf_bert.distributed.signal_watch import SIGNALS, end_with_parent
from mlperf_bert.errors import INTERRUPTED, ConfigError

PYTHON = sys.executable
# Stands for `python -P -m mlperf_bert`: each argument is what the rank of that number does.
RANK = r"""
import os, signal, sys, time
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
word = sys.argv[4:][int(os.environ["RANK"])]
ready = __file__ + ".ready."
for step in word.split(","):
    verb, _, value = step.partition("=")
    if verb == "wait":
        time.sleep(float(value))
        open(__file__ + ".waited", "w").close()
    elif verb == "later":
        time.sleep(0.3)
    elif verb == "after":  # that rank is ready for a signal
        while not os.path.exists(ready + value):
            time.sleep(0.01)
    elif verb == "kill":
        os.kill(os.getpid(), int(value))
    elif verb == "trap":
        signal.signal(signal.SIGTERM, lambda *_, status=int(value): sys.exit(status))
    elif verb == "ignore":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    elif verb == "again":  # Ctrl-C, once the first has come back
        signal.signal(signal.SIGINT, lambda *_: os.kill(os.getppid(), signal.SIGINT))
    elif verb == "tell":
        os.kill(os.getppid(), int(value))
    elif verb == "facts":
        names = "WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MLPERF_BERT_MEETING".split()
        names += ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
        mode = os.stat(os.path.dirname(os.environ["MLPERF_BERT_MEETING"])).st_mode
        open(value, "w").write("\n".join([oct(mode), *(os.environ[name] for name in names)]))
    elif verb == "note":
        open(value, "w").write(str(os.getpid()))
    else:
        sys.exit(int(verb))
    if verb in ("trap", "ignore"):
        open(ready + os.environ["RANK"], "w").close()
"""


@pytest.fixture(autouse=True)
def stands_for_python(tmp_path, monkeypatch):
    """Ranks that import nothing; the directory where they meet is in `tmp_path`."""
    script, program = tmp_path / "rank", tmp_path / "rank.py"
    program.write_text(RANK)
    words = shlex.join([sys.executable, "-SE", str(program)])
    script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield monkeypatch
    assert list(tmp_path.glob("mlperf_bert-*")) == []  # after every end


@pytest.mark.parametrize(
    ("ranks", "yields_s", "status", "cause"),
    [
        (("0", "0"), 1, 0, None),
        (("2", "wait=60"), 1, 2, None),  # a mistake, which the rank has told
        (("3", "3"), 1, 3, None),
        (("1", "wait=60"), 1, 1, "rank 0 (pid N) exited with status 1"),
        (("70", "wait=60"), 1, 70, "rank 0 (pid N) exited with status 70"),
        (("wait=60", "kill=9"), 1, 137, "rank 1 (pid N) was killed by SIGKILL"),
        (("1", "trap=2,wait=60"), 1, 1, "rank 0 (pid N) exited with status 1"),
        # A rank that only lost another is no cause, however late the other ends.
        (("70", "later,kill=9"), 60, 137, "rank 1 (pid N) was killed by SIGKILL"),
        (("later,70", "1"), 60, 1, "rank 1 (pid N) exited with status 1"),
    ],
)
def test_the_first_cause_is_a_line(
    ranks, yields_s, status, cause, stands_for_python, tmp_path, capfd
):
    stands_for_python.setattr(spawn, "_YIELDS_S", yields_s)
    assert spawn.run_on_ranks(ranks, 2, agreed_statuses=(75, 3)) == status
    assert not (tmp_path / "rank.py.waited").exists()  # who waits is not waited for
    said = re.sub(r"pid \d+", "pid N", capfd.readouterr().err)
    assert said == (f"mlperf_bert: first cause: {cause}\n" if cause else "")


@pytest.mark.parametrize(
    ("ranks", "status", "said"),
    [
        (("trap=75,after=1,tell=15,wait=60", "trap=75,wait=60"), 75, ""),
        (("trap=75,after=1,tell=15,wait=60", "trap=2,wait=60"), 2, ""),  # could not save
        (("trap=0,after=1,tell=15,wait=60", "trap=0,wait=60"), 0, ""),  # at its end anyway
        (("tell=15,wait=60", "wait=60"), 75, "stopped by SIGTERM before the first step"),
        (
            ("after=1,tell=15,wait=60", "ignore,wait=60"),
            75,
            "killing the ranks that did not exit within 1 s",
        ),
    ],
)
def test_a_signal_goes_to_the_ranks(ranks, status, said, stands_for_python, capfd):
    if "ignore" in ranks[1]:  # others may take their time on a busy machine
        stands_for_python.setattr(spawn, "SHUTDOWN_S", 1)
    before = [signal.getsignal(number) for number in SIGNALS]
    assert spawn.run_on_ranks(ranks, 2) == status
    assert [signal.getsignal(number) for number in SIGNALS] == before
    errors = capfd.readouterr().err
    assert said in errors if said else errors == ""


def test_a_second_ctrl_c_ends_ranks_that_hang(stands_for_python, tmp_path):
    stands_for_python.setattr(signal_watch, "TWICE_S", 0)
    assert spawn.run_on_ranks(("again,after=1,tell=2,wait=60", "ignore,wait=60"), 2) == INTERRUPTED
    assert not (tmp_path / "rank.py.waited").exists()


def test_ranks_meet_where_nobody_else_may_be(tmp_path):
    assert spawn.run_on_ranks([f"facts={tmp_path / 'facts'},0"], 1) == 0
    mode, *facts, gloo, nccl = (tmp_path / "facts").read_text().split("\n")
    assert stat.S_IMODE(int(mode, 8)) == 0o700
    assert facts[:3] == ["1", "0", "1"]
    assert Path(facts[3]).parent.parent == tmp_path
    assert gloo in ("lo", "lo0") and nccl == f"={gloo}"


def test_ranks_that_cannot_be_started_are_one_line(stands_for_python, tmp_path):
    stands_for_python.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="rank 0 of 2 could not be started"):
        spawn.run_on_ranks(["0", "0"], 2)


@pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux's")
def test_a_rank_that_begins_when_who_started_it_is_gone_ends():
    with subprocess.Popen(["true"]) as gone:
        pass
    with subprocess.Popen(["sleep", "60"], preexec_fn=partial(end_with_parent, gone.pid)) as late:
        assert late.wait(timeout=30) == -signal.SIGKILL


LAUNCHER = """
import sys
from mlperf_bert.distributed.spawn import run_on_ranks
sys.executable = sys.argv[1]
run_on_ranks([f"note={sys.argv[2]},wait=60"], 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux's")
def test_a_rank_is_gone_with_its_launcher(tmp_path):
    note, left = tmp_path / "note", tmp_path / "left"  # a killed launcher cannot tidy up
    left.mkdir()
    command = [PYTHON, "-c", LAUNCHER, sys.executable, str(note)]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(left)}) as launcher:
        while not note.exists() or not note.read_text():
            assert launcher.poll() is None
            time.sleep(0.05)
        launcher.kill()
    process, deadline = Path("/proc", note.read_text()), time.monotonic() + 30
    while is_there(process):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_there(process):
    """False if it is gone, or only left for its new parent to be seen."""
    try:
        return "State:\tZ" not in (process / "status").read_text()
    except OSError:
        return False
