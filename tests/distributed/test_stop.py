"""Ends from outside: a signal to the shell, before and after the first step, and a rank that dies.

SIGTERM, SIGUSR1 and a container's: tests/slurm and tests/container. Many more deaths:
tests/reliability.
"""

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlperf_bert.distributed.signal_watch import TWICE_S
from support import REPOSITORY

GO_ON = r"to go on: RESUME=auto LOGDIR={} CONFIG=.* \S*/run_and_time\.sh -- --set run.max_steps=.*$"


@dataclass(frozen=True)
class Shell:
    """run_and_time.sh that trains without end, on two ranks."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output: Path

    def wait_until(self, happens):
        deadline = time.monotonic() + 120
        while not happens():
            assert time.monotonic() < deadline, self.output.read_text()
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.05)

    def says(self, pattern):
        return re.search(pattern, self.output.read_text(), re.MULTILINE) is not None

    def rank(self, number):
        """Process of a rank."""
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                words = (directory / "environ").read_bytes().split(b"\0")
                command = (directory / "cmdline").read_bytes()
            except OSError:  # it is gone, or not ours
                continue
            if f"RANK={number}".encode() in words and bytes(self.run_dir) in command:
                return int(directory.name)
        return None


@contextmanager
def started(data, config, directory, terminal=None, **environ):
    endless = ("run.max_steps=1000000", "eval.interval_samples=100000000")
    two_ranks = ("parallel.ranks_per_node=2", "parallel.local_batch_size=8")
    sets = [word for setting in (*endless, *two_ranks) for word in ("--set", setting)]
    settings = {"CONFIG": config, "DATADIR": data, "LOGDIR": directory / "run"}
    output = directory / "output"

    def begin():
        # A shell cannot trap what was ignored when it began, as under nohup.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if terminal is not None:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    with output.open("w") as file:
        process = subprocess.Popen(
            ["./run_and_time.sh", "--", *sets],
            cwd=REPOSITORY,
            env={
                **os.environ,
                **{name: str(value) for name, value in settings.items()},
                "PYTHON": sys.executable,
                "OMP_NUM_THREADS": "1",
                "CLEAR_CACHES": "0",
                **environ,
            },
            stdin=terminal,
            stdout=file if terminal is None else terminal,
            stderr=subprocess.STDOUT,
            start_new_session=terminal is not None,
            preexec_fn=begin,
        )
    try:
        yield Shell(process, directory / "run", output)
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_the_shell_passes_ctrl_c_on(synthetic_data, tiny_config, tmp_path):
    with started(synthetic_data, tiny_config, tmp_path) as shell:
        shell.wait_until(lambda: shell.says(r"^step \d+/"))
        shell.process.send_signal(signal.SIGINT)
        assert shell.process.wait(timeout=60) == 75, shell.output.read_text()
        assert shell.says(r"^SIGINT received: stopped after step \d+")
        assert shell.says("^mlperf_bert: Ctrl-C: saving and ending; again to end at once$")
        assert shell.says(GO_ON.format(re.escape(str(shell.run_dir))))
    log = (tmp_path / "run/result_0.txt").read_text()
    assert '"status": "aborted"' in log.splitlines()[-1]
    assert (tmp_path / "run/run_0/checkpoints/LATEST").exists()


def test_before_the_first_step_a_signal_ends_every_rank(synthetic_data, tiny_config, tmp_path):
    """One rank is held back, so that the other waits for it: not in Python, where handlers run."""
    with started(synthetic_data, tiny_config, tmp_path) as shell:
        shell.wait_until(lambda: shell.rank(0) and shell.rank(1))
        first, held = shell.rank(0), shell.rank(1)
        assert first is not None and held is not None
        os.kill(held, signal.SIGSTOP)
        shell.wait_until(lambda: has_come(first))
        time.sleep(0.5)  # and waits for the other
        shell.process.send_signal(signal.SIGTERM)
        shell.wait_until(lambda: shell.says("^mlperf_bert: SIGTERM before the first step: nothing"))
        os.kill(held, signal.SIGCONT)
        assert shell.process.wait(timeout=60) == 75, shell.output.read_text()
    assert "Traceback" not in shell.output.read_text()
    assert not (tmp_path / "run/run_0/checkpoints/LATEST").exists()


@pytest.mark.real
def test_nothing_is_lost_with_a_terminal_or_a_shell(synthetic_data, tiny_config, tmp_path):
    """The terminal is closed; the run goes on in another, whose shell is killed."""
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    shown, metrics = bytearray(), tmp_path / "run/run_0/metrics.jsonl"

    def trains():
        with suppress(BlockingIOError):
            shown.extend(os.read(ours, 65536))
        return metrics.exists() and metrics.stat().st_size > 0

    with started(synthetic_data, tiny_config, tmp_path, theirs) as shell:
        os.close(theirs)
        shell.wait_until(trains)
        os.close(ours)
        assert shell.process.wait(timeout=60) == 75
    said = (tmp_path / "run/run_0/stdout.log").read_text()
    assert re.search(r"SIGHUP received: stopped after step (\d+)$", said, re.MULTILINE)
    assert re.search(GO_ON.format(re.escape(str(shell.run_dir))), said, re.MULTILINE)
    assert b"arning" not in shown and b"Traceback" not in shown
    checkpoint = (tmp_path / "run/run_0/checkpoints/LATEST").read_text()

    with started(synthetic_data, tiny_config, tmp_path, RESUME="auto") as shell:
        shell.wait_until(lambda: shell.says(r"^step \d+/"))
        shell.process.kill()
        shell.process.wait()
        deadline = time.monotonic() + 60
        while shell.rank(0) or shell.rank(1):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert shell.says("^SIGTERM received: stopped after step")  # as if it had been asked to end
    assert (tmp_path / "run/run_0/checkpoints/LATEST").read_text() > checkpoint


def has_come(rank):
    """True if the rank has reached the meeting point."""
    environ = Path(f"/proc/{rank}/environ").read_bytes().split(b"\0")
    place = next(word for word in environ if word.startswith(b"MLPERF_BERT_MEETING="))
    return os.path.exists(place.partition(b"=")[2])


@pytest.mark.real
def test_ctrl_c_twice_ends_ranks_that_hang(synthetic_data, tiny_config, tmp_path):
    with started(synthetic_data, tiny_config, tmp_path) as shell:
        shell.wait_until(lambda: shell.says(r"^step \d+/"))
        hung = shell.rank(1)
        assert hung is not None
        os.kill(hung, signal.SIGSTOP)
        shell.process.send_signal(signal.SIGINT)
        shell.wait_until(lambda: shell.says("again to end at once$"))
        time.sleep(TWICE_S + 0.5)
        shell.process.send_signal(signal.SIGINT)
        assert shell.process.wait(timeout=20) == 130, shell.output.read_text()
        deadline = time.monotonic() + 20
        while shell.rank(0) or shell.rank(1):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.real
def test_a_killed_rank_is_the_first_cause(synthetic_data, tiny_config, tmp_path):
    with started(synthetic_data, tiny_config, tmp_path) as shell:
        shell.wait_until(lambda: shell.says(r"^step \d+/"))
        victim = shell.rank(1)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        assert shell.process.wait(timeout=60) == 137, shell.output.read_text()
        cause = rf"^mlperf_bert: first cause: rank 1 \(pid {victim}\) was killed by SIGKILL$"
        assert shell.says(cause), shell.output.read_text()
        other = r"^mlperf_bert: error: rank 0 on \S+, step \d+: another rank closed the connection;"
        assert shell.says(other), shell.output.read_text()
