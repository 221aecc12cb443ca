"""A training job as a tree of processes: started, watched, frozen, and killed in parts."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time
import uuid
from contextlib import suppress
from pathlib import Path

MARK = "RELIABILITY_JOB"  # in the environment of every process of a job
POLL_S = 0.0005
LEAVING_S = 20  # for processes to be gone after the one that started them
COMMAND = (sys.executable, "-m", "mlperf_bert")


class Job:
    """A command, whose processes are ended with the context.

    Args:
        arguments: of the command.
        output: where it prints to; appended. In a `terminal` it prints there.
        command: what is started.
        environ: variables beside ours.
    """

    def __init__(self, arguments, output, *, command=COMMAND, terminal=None, **environ):
        self._mark = uuid.uuid4().hex
        self._output = output
        self._began = output.stat().st_size if output.exists() else 0
        quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", MARK: self._mark}

        def begin():
            # A background job may have started these tests with these ignored, and a shell cannot
            # trap what was ignored when it began.
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            if terminal is not None:
                fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

        with output.open("ab") as file:
            self.process = subprocess.Popen(
                [*command, *map(str, arguments)],
                env={**os.environ, **quiet, **{name: str(each) for name, each in environ.items()}},
                stdin=terminal,
                stdout=file if terminal is None else terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C reaches it alone
                preexec_fn=begin,
            )

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for process in [self.process.pid, *self.processes()]:
            _send(process, signal.SIGKILL)
        self.process.wait()

    @property
    def is_running(self):
        """Whether the process that was started has not ended."""
        return self.process.poll() is None

    def printed(self):
        """The output of this job so far."""
        return self._output.read_bytes()[self._began :].decode(errors="replace")

    def says(self, pattern):
        """Whether it has printed a line that matches."""
        return re.search(pattern, self.printed(), re.MULTILINE) is not None

    def processes(self):
        """Environments of all processes of the job, by number, without those that have ended."""
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                environ = _environ(int(entry))
                if environ.get(MARK) == self._mark:
                    found[int(entry)] = environ
        return found

    def ranks(self):
        """Numbers of the processes of the ranks, by rank; none where the job itself is the rank."""
        return {
            int(environ["RANK"]): process
            for process, environ in self.processes().items()
            if "RANK" in environ and "RANK" not in _environ(_parent(process))
        }

    def wait_for_ranks(self, count, within_s):
        """Return `ranks` as soon as there are `count`."""
        self.wait_until(lambda: len(self.ranks()) == count, within_s)
        return self.ranks()

    def wait_until(self, condition, within_s):
        """Return when `condition()`; fails where the job ends before, or it takes too long."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert self.is_running, self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(POLL_S)

    def ended(self, within_s):
        """Wait for the end; the status, as a shell has it. Fails where any process is left."""
        status = self.process.wait(timeout=within_s)
        deadline = time.monotonic() + LEAVING_S
        while self.processes():
            assert time.monotonic() < deadline, f"left: {self.processes().keys()}"
            time.sleep(0.05)
        return status if status >= 0 else 128 - status


def freeze(processes):
    """Stop processes, and return when none of them runs any more."""
    for process in processes:
        _send(process, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while any(_state(process) not in "TZX" for process in processes):
        assert time.monotonic() < deadline
        time.sleep(POLL_S)


def thaw(processes):
    """Let frozen processes go on."""
    for process in processes:
        _send(process, signal.SIGCONT)


def kill(process):
    """As `kill -9`."""
    _send(process, signal.SIGKILL)


def anonymous_bytes(process):
    """Memory of its own that a process has in RAM (RssAnon); None where it has ended.

    Without pages of files: how many of a library are there depends on what else the machine does.
    """
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return None
    kilobytes = re.search(r"^RssAnon:\s+(\d+) kB$", text, re.MULTILINE)
    return int(kilobytes[1]) * 1024 if kilobytes else None  # a zombie has no such line


def _send(process, number):
    with suppress(ProcessLookupError):
        os.kill(process, number)


def _environ(process):
    try:
        words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:  # has ended, or is somebody else's
        return {}
    pairs = (word.decode(errors="replace").partition("=") for word in words if word)
    return {name: value for name, _, value in pairs}


def _parent(process):
    return int((_stat(process) or ["X", "0"])[1])


def _state(process):
    return (_stat(process) or ["X"])[0]


def _stat(process):
    """State, parent and so on; empty where it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name before may hold anything
