"""Worker processes: a terminal's signals end them without a word, whatever they are doing."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from mlperf_bert.prepare.pool import run_with_progress

SCRIPT = """
import sys, time
from pathlib import Path
from mlperf_bert.prepare.pool import run_with_progress
from mlperf_bert.distributed.signal_watch import EndingInOrder
there, moment = Path(sys.argv[1]), sys.argv[2]

def work(job):
    (there / str(job)).touch()
    time.sleep(0 if job == "idle" else 600)

if __name__ == "__main__":
    try:
        with EndingInOrder():
            for _ in run_with_progress(
                work, ["idle", "busy"], 2, sizes=[1, 1], activity="working", quiet=True
            ):
                pass
    except KeyboardInterrupt:
        print("interrupted")
elif moment == "start":
    (there / "busy").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("moment", "number"),
    [("start", signal.SIGINT), ("work", signal.SIGINT), ("work", signal.SIGHUP)],
)
def test_an_interrupt_is_quiet_and_does_not_wait(tmp_path, moment, number):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    running = subprocess.Popen(
        [sys.executable, script, tmp_path, moment],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background job ignores it, and so would whatever it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not (tmp_path / "busy").exists() and running.poll() is None:
            time.sleep(0.02)
        time.sleep(0.3)  # so that the other worker has nothing to do
        os.killpg(running.pid, number)  # as a terminal does
        printed, errors = running.communicate(timeout=100)
    finally:
        running.kill()
    assert (printed, errors) == ("interrupted\n", "")


def test_an_interrupt_while_jobs_are_given_out_ends_them(monkeypatch):
    submit = ProcessPoolExecutor.submit

    def interrupted(pool, *job):
        given = submit(pool, *job)
        os.kill(os.getpid(), signal.SIGINT)
        return given

    monkeypatch.setattr(ProcessPoolExecutor, "submit", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    long = 1000.0  # seconds, more than a test may take
    shown = {"sizes": [1, 1], "activity": "sleeping", "quiet": True}
    try:
        with pytest.raises(KeyboardInterrupt):
            next(run_with_progress(time.sleep, [long, long], 2, **shown))
    finally:
        signal.signal(signal.SIGINT, before)
