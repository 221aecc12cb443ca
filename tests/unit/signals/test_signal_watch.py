"""What a signal does at once, before the first step and at a second Ctrl-C; the status file."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlperf_bert.common import errors
from mlperf_bert.signals import signal_watch
from mlperf_bert.signals.signal_watch import SIGNALS, CtrlC, SignalWatch, write_status
from mlperf_bert.signals.whereabouts import Whereabouts
from support import REPOSITORY

HINT = "mlperf_bert: Ctrl-C: saving and ending; again to end at once\n"


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Statuses with which the process would have been left; handlers are as before."""
    statuses: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with monkeypatch.context() as patched:
        patched.setattr(signal_watch.os, "_exit", statuses.append)
        yield statuses
    for number, handler in before.items():
        signal.signal(number, handler)


def training() -> Whereabouts:
    whereabouts = Whereabouts()
    whereabouts.at("step", 1)
    return whereabouts


@pytest.mark.parametrize("number", SIGNALS)
def test_before_the_first_step_there_is_nothing_to_save(
    number: signal.Signals, left: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "status"
    with SignalWatch(Whereabouts(), speaks=False, status_file=file):
        os.kill(os.getpid(), number)
    assert left == [75]
    assert file.read_text() == "75\n"
    said = capsys.readouterr().err
    assert said.startswith(f"mlperf_bert: {number.name} before the first step: nothing to save\n")


def test_later_signals_are_left_to_the_loop(
    left: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    with SignalWatch(training(), speaks=True):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGINT)  # a terminal and a launcher send it
    assert left == []
    assert capsys.readouterr().err == HINT
    os.kill(os.getpid(), signal.SIGTERM)  # nor do they end a rank that leaves


def test_one_rank_speaks_for_all(left: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    with SignalWatch(training(), speaks=False):
        os.kill(os.getpid(), signal.SIGINT)
    assert (left, capsys.readouterr().err) == ([], "")


def test_handlers_are_given_back_where_nothing_came() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with SignalWatch(training(), speaks=True):
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_hangup_that_is_ignored_stays_so(left: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` begins a command
    with SignalWatch(None, speaks=False):
        os.kill(os.getpid(), signal.SIGHUP)
    assert left == []


def test_a_second_ctrl_c_is_one_that_comes_later() -> None:
    now = [5.0]
    ctrl_c = CtrlC(lambda: now[0])
    assert not ctrl_c.came_again()
    now[0] = 5.5
    assert not ctrl_c.came_again()
    now[0] = 6.5
    assert ctrl_c.came_again()


# The main thread is in a call that signals do not interrupt, as in a wait for other ranks.
STUCK = """
import ctypes
from mlperf_bert.signals.signal_watch import SignalWatch
from mlperf_bert.signals.whereabouts import Whereabouts
whereabouts = Whereabouts()
whereabouts.at("step", 1)
with SignalWatch(whereabouts, speaks=True):
    print("begun", flush=True)
    for _ in range(60):
        ctypes.CDLL(None).usleep(500_000)
"""


def test_ctrl_c_twice_ends_a_stuck_process_that_began_in_the_background() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    time.sleep(signal_watch.TWICE_S + 0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, HINT)


def test_readers_see_one_whole_status_while_ranks_write_it(tmp_path: Path) -> None:
    path = tmp_path / "status_0"
    assert write_status(path, 3)
    ranks = [threading.Thread(target=_write_often, args=(path,)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    seen = set()
    while any(rank.is_alive() for rank in ranks):
        seen.add(path.read_text())
    assert seen <= {"3\n", "75\n"}
    assert path.read_text() == "75\n"
    assert list(tmp_path.iterdir()) == [path]


def _write_often(path: Path) -> None:
    for _ in range(50):
        write_status(path, 75)


def test_a_file_that_cannot_be_written_is_a_warning(
    left: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none/status_0"
    with SignalWatch(Whereabouts(), speaks=False, status_file=path):
        os.kill(os.getpid(), signal.SIGTERM)
    assert left == [75]
    said = f"{path} cannot be written (No such file or directory): it was to tell status 75"
    assert capsys.readouterr().err.startswith(f"mlperf_bert: warning: {said}\n")
    taken = tmp_path / "status_0"
    taken.mkdir()
    assert not write_status(taken, 75)
    assert list(tmp_path.iterdir()) == [taken]


def test_the_shell_knows_the_same_statuses() -> None:
    script = (REPOSITORY / "run_and_time.sh").read_text()
    names = re.findall(r"^([A-Z_]+)=(\d+)$", script, re.MULTILINE)
    assert {"TARGET_MISSED", "STOPPED"} <= {name for name, _ in names}
    for name, number in names:
        assert getattr(errors, name) == int(number)
