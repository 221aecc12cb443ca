"""The heartbeat: silent while steps end, and the end of a process whose step does not."""

import subprocess
import sys
import time

from mlperf_bert.heartbeat import EXIT_STATUS, Heartbeat

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
from mlperf_bert.heartbeat import Heartbeat, end_process
with Heartbeat(0.1, lambda step: end_process(f"step {step} hangs"), poll_s=0.01) as heartbeat:
    heartbeat.watch(7, lambda: False)
    time.sleep(60)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == EXIT_STATUS
    assert ended.stderr == "step 7 hangs\n"
