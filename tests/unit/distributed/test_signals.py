"""What a rank is doing, and what a signal does: at once, or decided by all ranks at one step."""

import itertools
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mlperf_bert.distributed import signal_watch, stop_request
from mlperf_bert.distributed.signal_watch import (
    SIGNALS,
    CtrlC,
    SignalWatch,
    Whereabouts,
    write_status,
)
from mlperf_bert.distributed.stop_request import StopRequest

CPU = torch.device("cpu")
HINT = "mlperf_bert: saving and stopping because of Ctrl-C (press Ctrl-C again to exit at once)\n"


@pytest.fixture(autouse=True)
def handlers():
    """They are as before, whatever stays caught."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def left(monkeypatch):
    """Statuses with which the process would have been left."""
    statuses = []
    with monkeypatch.context() as patched:
        patched.setattr(signal_watch.os, "_exit", statuses.append)
        yield statuses


class Clock:
    """A clock that a test turns."""

    now = 5.0

    def __call__(self):
        return self.now


def training():
    whereabouts = Whereabouts()
    whereabouts.at("step", 1)
    return whereabouts


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("speaks", [True, False])
def test_before_the_first_step_one_rank_says_how_to_resume(number, speaks, left, tmp_path, capsys):
    file = tmp_path / "status"
    with SignalWatch(Whereabouts(), speaks=speaks, status_file=file, hint="to resume: x"):
        os.kill(os.getpid(), number)
    assert left == [75]
    assert file.read_text() == "75\n"
    printed = capsys.readouterr()
    said = f"mlperf_bert: stopped by {number.name} before the first step, so no training was lost\n"
    assert printed.err.startswith(said) if speaks else printed.err == ""
    assert printed.out == ("to resume: x\n" if speaks else "")


@pytest.mark.parametrize(("speaks", "said"), [(True, HINT), (False, "")])
def test_later_signals_are_left_to_the_loop_and_one_rank_speaks(speaks, said, left, capsys):
    with SignalWatch(training(), speaks=speaks):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGINT)  # a terminal and a launcher send it
    assert (left, capsys.readouterr().err) == ([], said)
    os.kill(os.getpid(), signal.SIGTERM)  # nor do they end a rank that leaves


@pytest.mark.parametrize(
    "make", [lambda: SignalWatch(training(), speaks=True), lambda: StopRequest(1, CPU)]
)
def test_handlers_are_given_back_where_nothing_came(make):
    before = [signal.getsignal(number) for number in SIGNALS]
    with make():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_hangup_that_is_ignored_stays_so(left):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` begins a command
    with SignalWatch(None, speaks=False):
        os.kill(os.getpid(), signal.SIGHUP)
    assert left == []


def test_a_second_ctrl_c_is_one_that_comes_later():
    clock = Clock()
    ctrl_c = CtrlC(clock)
    for seconds, came_again in ((0, False), (0.5, False), (1, True)):
        clock.now += seconds
        assert ctrl_c.came_again() == came_again


def test_words_and_progress():
    whereabouts = Whereabouts()
    assert (whereabouts.in_words, whereabouts.in_start_up) == ("start-up", True)
    assert whereabouts.progress is None
    for doing, number, words, must_go_on in (
        ("batch", 38, "waiting for the batch of step 38", True),
        ("evaluation", 16384, "evaluation after 16,384 samples", True),
        ("checkpoint", 120, "checkpoint of step 120", False),
        ("end", None, "end of the run", False),
    ):
        whereabouts.at(doing, number)
        assert (whereabouts.in_words, whereabouts.in_start_up) == (words, False)
        before = whereabouts.progress
        whereabouts.at(doing, number)  # the same again is progress
        assert (before is not None and before != whereabouts.progress) == must_go_on


# The main thread is in a call that signals do not interrupt, as in a wait for other ranks.
STUCK = """
import ctypes
from mlperf_bert.distributed.signal_watch import SignalWatch, Whereabouts
from mlperf_bert.distributed.stop_request import StopRequest
whereabouts = Whereabouts()
whereabouts.at("step", 1)
with SignalWatch(whereabouts, speaks=True):
    print("begun", flush=True)
    for _ in range(60):
        ctypes.CDLL(None).usleep(500_000)
"""


def test_ctrl_c_twice_ends_a_stuck_process_that_began_in_the_background():
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == HINT  # so it has come
    time.sleep(signal_watch.TWICE_S + 0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "")


def test_readers_see_one_whole_status_while_ranks_write_it(tmp_path):
    path = tmp_path / "status_0"
    assert write_status(path, 3)
    with ThreadPoolExecutor() as ranks:
        written = [ranks.submit(write_status, path, 75) for _ in range(200)]
        seen = set()
        while not all(each.done() for each in written):
            seen.add(path.read_text())
    assert seen <= {"3\n", "75\n"}
    assert path.read_text() == "75\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_a_warning(left, tmp_path, capsys):
    path = tmp_path / "none/status_0"
    with SignalWatch(Whereabouts(), speaks=False, status_file=path):
        os.kill(os.getpid(), signal.SIGTERM)
    assert left == [75]
    said = f"cannot write status 75 to {path} (No such file or directory)"
    assert capsys.readouterr().err.startswith(f"mlperf_bert: warning: {said}\n")
    taken = tmp_path / "status_0"
    taken.mkdir()
    assert not write_status(taken, 75)
    assert list(tmp_path.iterdir()) == [taken]


@pytest.mark.parametrize("number", SIGNALS)
def test_one_rank_stops_after_the_step_of_the_signal_and_saves_whatever_follows(number):
    with StopRequest(1, CPU) as stop:
        assert stop.agreed(1) is None
        os.kill(os.getpid(), number)
        assert stop.agreed(2) == number.name
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(3) == "SIGTERM"  # named, because scancel may bring both
    os.kill(os.getpid(), signal.SIGTERM)  # nor one that leaves after that


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_time_of_a_step_has_no_evaluations_in_it(num_ranks, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stop_request.dist, "all_reduce", lambda *_: None)
    with StopRequest(num_ranks, CPU, clock=clock) as stop:
        stop.exclude(9.0)  # before the first step, there is nothing to exclude it from
        for step in range(1, 400):
            clock.now += 0.125
            assert stop.agreed(step) is None
            assert stop.step_s in (None, 0.125)
            if step % 7 == 0:
                clock.now += 60.0
                stop.exclude(60.0)
    assert stop.step_s == 0.125


@pytest.mark.parametrize(
    ("own_s", "other_s", "most"),
    [(0.01, 0, 102), (4.0, 0, 1), (1e-6, 0, 1000), (0.01, 0.5, 2)],
)
def test_ranks_ask_each_other_about_once_a_second(own_s, other_s, most, monkeypatch):
    """The other rank has the signal from the start; until the next question nobody knows."""
    asked = []
    other_has_signal = False
    clock = Clock()
    step, slowest = 0, max(own_s, other_s)

    def all_reduce(numbers, operation):
        asked.append(step)
        numbers[1] = max(float(numbers[1]), other_s)
        if other_has_signal:
            numbers[0] = float(signal.SIGTERM)

    monkeypatch.setattr(stop_request.dist, "all_reduce", all_reduce)
    with StopRequest(2, CPU, clock=clock) as stop:
        assert stop.step_s is None
        for step in range(121, 2121):  # as of a resumed run
            clock.now += own_s
            assert stop.agreed(step) is None
            assert stop.step_s == pytest.approx(slowest)
        gap = max(after - before for before, after in itertools.pairwise(asked))
        assert gap <= most and gap * slowest <= max(1.01, slowest)
        other_has_signal = True
        answers = []
        for step in range(2121, 2121 + gap):
            clock.now += own_s
            answers.append(stop.agreed(step))
        assert [answer for answer in answers if answer] == ["SIGTERM"]
