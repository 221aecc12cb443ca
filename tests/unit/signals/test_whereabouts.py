"""The activity of a rank in words, its watching, and its end when a step hangs."""

import signal
import subprocess
import sys
import time

import pytest

from mlperf_bert.common.errors import LOST
from mlperf_bert.signals.whereabouts import Doing, Heartbeat, Watch, Whereabouts
from support import run_process

POLL_S = 0.01


def test_steps_that_end_are_no_hang() -> None:
    hung: list[int] = []
    with Heartbeat(0.2, hung.append, poll_s=POLL_S) as heartbeat:
        for step in range(1, 6):
            until = time.monotonic() + 0.1
            heartbeat.watch(step, lambda until=until: time.monotonic() > until)  # type: ignore[misc]
            time.sleep(0.11)
        time.sleep(0.4)  # nothing to wait for is no hang either
    assert hung == []


def test_the_first_step_that_does_not_end_is_named_once() -> None:
    hung: list[int] = []
    with Heartbeat(0.1, hung.append, poll_s=POLL_S) as heartbeat:
        heartbeat.watch(1, lambda: True)
        heartbeat.watch(2, lambda: False)
        heartbeat.watch(3, lambda: False)
        deadline = time.monotonic() + 10
        while not hung and time.monotonic() < deadline:
            time.sleep(POLL_S)
        time.sleep(0.2)
    assert hung == [2]


def test_steps_queued_ahead_have_the_time_of_those_before_them() -> None:
    hung: list[int] = []
    started = time.monotonic()
    with Heartbeat(0.3, hung.append, poll_s=POLL_S) as heartbeat:
        for step in (1, 2, 3):  # all queued at once, each takes two thirds of the time-out
            heartbeat.watch(step, lambda step=step: time.monotonic() > started + 0.2 * step)  # type: ignore[misc]
        time.sleep(0.8)
    assert hung == []


def test_a_hung_step_ends_the_process_with_one_line() -> None:
    program = """
import time
from mlperf_bert.signals.whereabouts import Heartbeat, end_process
with Heartbeat(0.1, lambda step: end_process(f"step {step} hangs"), poll_s=0.01) as heartbeat:
    heartbeat.watch(7, lambda: False)
    time.sleep(60)
"""
    ended = run_process(sys.executable, "-c", program)
    assert ended.returncode == LOST
    assert ended.stderr == "mlperf_bert: error: step 7 hangs\n"


def test_a_hang_is_told_until_it_is_said() -> None:
    told: list[float] = []

    def say(sign: int, seconds: float) -> bool:
        assert sign == 3
        told.append(seconds)
        return len(told) == 3

    deadline = time.monotonic() + 10
    with Watch(lambda: 3, 5 * POLL_S, say, poll_s=POLL_S):
        while len(told) < 3 and time.monotonic() < deadline:
            time.sleep(POLL_S)
        time.sleep(0.2)  # it is not told again
    assert told == [5 * POLL_S, 6 * POLL_S, 7 * POLL_S]


def test_a_process_that_was_stopped_and_goes_on_has_not_hung() -> None:
    program = """
import time
from mlperf_bert.signals.whereabouts import Watch, end_process
steps = 0
with Watch(lambda: steps, 0.5, lambda *_: end_process("hangs"), poll_s=0.05):
    print("begun", flush=True)
    while steps < 40:
        steps += 1
        time.sleep(0.02)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=50)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    ("doing", "number", "words", "must_go_on"),
    [
        ("batch", 38, "waiting for the batch of step 38", True),
        ("step", 37, "step 37", True),
        ("evaluation", 16384, "evaluation after 16,384 samples", True),
        ("checkpoint", 120, "checkpoint of step 120", False),
        ("end", None, "end of the run", False),
    ],
)
def test_words(doing: Doing, number: int | None, words: str, must_go_on: bool) -> None:
    whereabouts = Whereabouts()
    assert (whereabouts.in_words, whereabouts.in_start_up) == ("start-up", True)
    assert whereabouts.sign_of_life() is None
    whereabouts.at(doing, number)
    assert (whereabouts.in_words, whereabouts.in_start_up) == (words, False)
    assert (whereabouts.sign_of_life() is not None) == must_go_on


def test_the_same_words_again_are_a_sign_of_life() -> None:
    whereabouts = Whereabouts()
    signs = []
    for _ in range(3):
        whereabouts.at("evaluation", 5)
        signs.append(whereabouts.sign_of_life())
        assert whereabouts.sign_of_life() == signs[-1]
    assert len(set(signs)) == 3
