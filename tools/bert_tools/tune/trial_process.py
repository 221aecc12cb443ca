"""Processes of a study: one per training, watched and ended in order; its workers; signals."""

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from bert_tools.tune.objective import Curve, read_curve
from mlperf_bert.common.errors import INTERRUPTED, STOPPED, ConfigError, say
from mlperf_bert.common.untrusted import not_through_a_link
from mlperf_bert.signals.signal_watch import CaughtSignals, end_with_parent

POLL_S = 0.25
HEARTBEAT_S = 5.0
END_S = 120.0  # seconds for a training to end after SIGTERM, as its ranks may take 110 s
LOST_AFTER_S = 300.0  # without a heartbeat for so long, a trial on another machine counts as lost

HEARTBEAT = "heartbeat"
LOG = "train.log"
WORKER = "--as-worker"
DEFAULT_TRAINER = (sys.executable, "-P", "-m", "mlperf_bert", "train")


class StopSignal(CaughtSignals):
    """Handles signals; a second Ctrl-C ends at once, and trainings die with this process."""

    @property
    def came(self) -> bool:
        """True if a signal asked for the end."""
        return self.first != 0

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record a signal and print its effect."""
        super().note(number, frame)
        if self.at_once:
            os._exit(INTERRUPTED)
        name = signal.Signals(number).name
        say(f"{name}: ending the training; the same command continues the study")


class TrialProcess:
    """A training in its run directory `directory`, with its output in `train.log` there.

    It dies with this process (on Linux), and a terminal's Ctrl-C reaches only this process.
    """

    def __init__(self, trainer: Sequence[str], directory: Path, data: Path, config: Path) -> None:
        """Start the training. Raises ConfigError if the trainer cannot be started."""
        options = ("--config", config, "--data", data, "--run-dir", directory)
        command = [*trainer, *map(str, options)]
        self._directory = directory
        self._beat_at = 0.0
        self._seen = (0, 0)
        self._evaluations = 0
        with open(directory / LOG, "ab", opener=not_through_a_link) as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=partial(end_with_parent, os.getpid()),
                )
            except OSError as error:
                problem = f"{command[0]!r} cannot be started ({error.strerror})"
                raise ConfigError("--trainer", problem, "give a command that is there") from None

    def wait(self, on_evaluation: Callable[[Curve], bool], is_stopped: Callable[[], bool]) -> int:
        """Wait for the end; returns its exit status, 128 + n for signal n.

        `on_evaluation` takes the curve up to each evaluation, one by one even if several come at
        once, and returns True to end the training; `is_stopped` is polled.
        """
        try:
            while self._process.poll() is None:
                if time.monotonic() - self._beat_at >= HEARTBEAT_S:
                    self._beat_at = time.monotonic()
                    beat(self._directory)
                if is_stopped() or any(map(on_evaluation, self._news())):
                    break
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(POLL_S)
        finally:  # after an error too: no training may continue unseen
            self._end()
        status = self._process.wait()
        return status if status >= 0 else 128 - status

    def _news(self) -> list[Curve]:
        """The curve up to each evaluation since the last call."""
        run = self._directory / "run_0"
        try:
            found = (run / "metrics.jsonl").stat()
        except OSError:
            return []
        seen, self._seen = self._seen, (found.st_size, found.st_mtime_ns)
        if self._seen == seen:
            return []
        curve = read_curve(run)
        known, self._evaluations = self._evaluations, len(curve)
        return [curve[:number] for number in range(known + 1, len(curve) + 1)]

    def _end(self) -> None:
        """Send SIGTERM, on which a training saves and ends; then SIGKILL to all its processes."""
        self._process.terminate()  # does nothing after the end
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def beat(directory: Path) -> None:
    """Write the trial's heartbeat; a full disk is no reason to end."""
    with suppress(OSError):
        (directory / HEARTBEAT).touch()


def owner() -> dict[str, str | int]:
    """This process as the owner of a trial."""
    return {"host": platform.node(), "pid": os.getpid()}


def is_lost(directory: Path, of: object, now_on_disk: float) -> bool:
    """True if the owner of a running trial is gone, by its process or its heartbeat.

    `now_on_disk` is the time by the clock that writes the heartbeats, in seconds.
    """
    if isinstance(of, dict) and of.get("host") == platform.node():
        pid = of.get("pid")
        if type(pid) is not int or not 0 < pid < 2**31 or not _exists(pid):
            return True
    try:
        last = (directory / HEARTBEAT).stat().st_mtime
    except OSError:
        return True
    return now_on_disk - last > LOST_AFTER_S


def last_line(directory: Path) -> str:
    """The last line that a training printed, for a message."""
    lines: list[str] = []
    with suppress(OSError), (directory / LOG).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "nothing was printed"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def run_workers(command_line: Sequence[str], count: int, stop: StopSignal) -> int:
    """Run so many workers and wait; 0, STOPPED after a signal, or the first failed status.

    When one fails, the others are asked to end, as by a signal.
    """
    command = [sys.executable, "-P", "-m", "mlperf_bert", *command_line, WORKER]
    workers = [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        for _ in range(count)
    ]
    failed, told, at_work = 0, False, True
    try:
        while at_work:
            at_work = any([each.poll() is None for each in workers])
            failed = failed or next((each.returncode for each in workers if each.returncode), 0)
            if (stop.came or failed) and not told:
                told = True
                _tell(workers)
            time.sleep(POLL_S if at_work else 0)
    finally:
        _tell(workers)
    if stop.came:
        return STOPPED
    return failed if failed >= 0 else 128 - failed


def _tell(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for each in workers:
        if each.poll() is None:
            with suppress(ProcessLookupError):
                each.terminate()
