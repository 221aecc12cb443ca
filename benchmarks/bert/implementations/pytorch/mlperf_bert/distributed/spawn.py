"""Our own launcher, which starts and supervises the ranks of a command on this machine.

The ranks meet through a file in a private directory and communicate over the loopback interface.
Therefore no store listens on the network, and other users cannot send data to the ranks.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self

from mlperf_bert.distributed.launch import MEETING
from mlperf_bert.distributed.signal_watch import (
    CaughtSignals,
    end_with_parent,
    say_stopped_early,
)
from mlperf_bert.errors import INTERRUPTED, LOST, MISTAKE, STOPPED, ConfigError, say
from mlperf_bert.machine import memory_bytes

_RANK_BYTES = 256 * 2**20  # memory of Python and torch in one rank
SHUTDOWN_S = 110  # how long ranks may take to save and exit, less than launch/docker.sh waits
_LEAVING_S = 20  # how long ranks may take to exit after one has failed
_POLL_S = 0.05
_LOOPBACK_S = 5
_YIELDS_S = 1.0  # how long to wait for the failure that caused another rank's error


def run_on_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    agreed_statuses: Collection[int] = (STOPPED,),
    hint: str | None = None,
    signals: CaughtSignals | None = None,
) -> int:
    """Run `python -P -m mlperf_bert <arguments>` on ranks 0 .. num_ranks - 1 of this machine.

    Returns 0 if all ranks succeed, and otherwise the exit status of the rank that failed first (128
    + n for signal n). After a failure the other ranks get SIGTERM, and SIGKILL _LEAVING_S seconds
    later. A line on stderr names the rank that failed. The line is omitted if the status is MISTAKE
    or one of `agreed_statuses`, because all ranks exit with these together.

    The function passes SIGTERM, SIGUSR1, SIGHUP and SIGINT on to the ranks, and sends SIGKILL
    SHUTDOWN_S seconds later. It then returns STOPPED, 0 if all ranks had finished, or a status on
    which the ranks agreed. A second Ctrl-C ends the ranks and this process at once. On Linux the
    ranks also end when this process is killed.

    If a signal ends rank 0 before it can report the signal, this function reports it, and prints
    `hint`. The function records signals in `signals`, so that a caller can see whether one arrived
    after the ranks had finished their work.

    Raises ConfigError if the ranks cannot be started, or need more memory than the machine has.
    """
    _check_number(num_ranks)
    if num_ranks > 1:
        _check_loopback()
    signals = signals or CaughtSignals()
    with signals, _meeting_directory() as directory, _Ranks() as ranks:
        ranks.start(arguments, num_ranks, f"{directory}/store")
        yielding = (*agreed_statuses, LOST, MISTAKE)
        while ranks.run() and not signals.first and not ranks.have_failed(yielding):
            time.sleep(_POLL_S)
        first = ranks.first_failure()
        ranks.end(signals)
        if signals.at_once:
            return INTERRUPTED
        if signals.first:
            return _after_signal(ranks, signals.first, agreed_statuses, hint)
        if first is None:
            return 0
        status = ranks.ended[first]
        if status not in (MISTAKE, *agreed_statuses):
            how = f"exited with status {status}"
            if status < 0:
                how = f"was killed by {signal.Signals(-status).name}"
            say(f"first cause: rank {first} (pid {ranks.processes[first].pid}) {how}")
        return status if status >= 0 else 128 - status


def _check_number(num_ranks: int) -> None:
    """Raise ConfigError if the machine has too little memory for Python and torch on all ranks."""
    needed = num_ranks * _RANK_BYTES
    if needed > memory_bytes():
        problem = (
            f"{num_ranks:,} ranks need at least {needed / 2**30:,.0f} GiB of memory, but this "
            f"machine has {memory_bytes() / 2**30:,.0f} GiB"
        )
        raise ConfigError("parallel.ranks_per_node", problem, "use fewer ranks per node")


def _check_loopback() -> None:
    """Raise ConfigError if processes of this machine cannot connect to each other.

    The loopback interface may be down in a sandbox. gloo would report only a lost rank, and not
    this cause.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_S).close()
    except OSError as error:
        problem = f"the loopback interface cannot be used (127.0.0.1: {error.strerror or error})"
        remedy = "bring the interface up (ip link set lo up), or use one rank "
        remedy += "(--set parallel.ranks_per_node=1)"
        raise ConfigError("network", problem, remedy) from None


def _after_signal(
    ranks: "_Ranks", number: int, agreed_statuses: Collection[int], hint: str | None
) -> int:
    """Return the exit status of the launcher after it has passed a signal on to the ranks."""
    statuses = list(ranks.ended.values())
    if len(statuses) < len(ranks.processes):  # `end` has reported that it killed some
        return STOPPED
    if ranks.ended[0] == -number:  # too early for rank 0 to report it
        say_stopped_early(signal.Signals(number).name, hint)
    if not any(statuses):
        return 0
    return next((each for each in (MISTAKE, *agreed_statuses) if each in statuses), STOPPED)


@contextmanager
def _meeting_directory() -> Iterator[Path]:
    """Return a context manager with a temporary directory that only this user can enter.

    Raises ConfigError if the directory cannot be created.
    """
    try:
        directory = Path(tempfile.mkdtemp(prefix="mlperf_bert-"))
    except OSError as error:
        problem = f"the directory for temporary files is not writable ({error.strerror})"
        remedy = "set TMPDIR to a directory that you can write to"
        raise ConfigError("TMPDIR", problem, remedy) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _environment(rank: int, num_ranks: int, meeting: str) -> dict[str, str]:
    """Return the environment variables for one rank's process."""
    own = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
    # The loopback interface is called lo on Linux and lo0 on macOS.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    # Without the "=", NCCL would use the name as a prefix.
    interfaces = {"GLOO_SOCKET_IFNAME": loopback[0], "NCCL_SOCKET_IFNAME": f"={loopback[0]}"}
    return {
        **os.environ,
        **{name: str(n) for name, n in own.items()},
        **interfaces,
        MEETING: meeting,
    }


def _prepare_rank(parent: int) -> None:
    """Prepare the process of a rank before Python starts in it.

    Ctrl-C is blocked until `main` unblocks it (`unblock_ctrl_c`). Otherwise Python would print a
    traceback at a Ctrl-C during its start.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    end_with_parent(parent)


class _Ranks:
    """The processes of all ranks. They are killed when the context exits."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        # The status of each rank that has ended, -n for signal n, in the order of their ends.
        self.ended: dict[int, int] = {}
        self._failed_at: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGKILL)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):  # hanging storage blocks even SIGKILL
                process.wait(timeout=5)

    def start(self, arguments: Sequence[str], count: int, meeting: str) -> None:
        """Start the processes of all ranks.

        Call this method in the main thread, because the processes end when the thread that started
        them ends. Raises ConfigError if a process cannot be started.
        """
        for rank in range(count):
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "mlperf_bert", *arguments],
                    env=_environment(rank, count, meeting),
                    start_new_session=True,  # so that only this process passes on Ctrl-C
                    preexec_fn=partial(_prepare_rank, os.getpid()),
                )
            except (OSError, subprocess.SubprocessError) as error:
                problem = f"rank {rank} of {count} could not be started ({error})"
                remedy = "use fewer ranks, or raise the limit on processes (ulimit -u)"
                raise ConfigError("parallel.ranks_per_node", problem, remedy) from None
            self.processes.append(process)

    def run(self) -> bool:
        """Record which ranks have ended, and return True if any rank is still running."""
        for rank, process in enumerate(self.processes):
            if rank not in self.ended and process.poll() is not None:
                self.ended[rank] = process.returncode
        return len(self.ended) < len(self.processes)

    def have_failed(self, yielding: Collection[int]) -> bool:
        """Return True if a rank has failed.

        If the only failures have a status in `yielding`, which another rank's failure may have
        caused, the method returns True only after _YIELDS_S seconds. The rank that caused these
        failures can then be recorded too.
        """
        failed = [status for status in self.ended.values() if status]
        if failed and self._failed_at is None:
            self._failed_at = time.monotonic()
        return any(status not in yielding for status in failed) or (
            self._failed_at is not None and time.monotonic() - self._failed_at > _YIELDS_S
        )

    def first_failure(self) -> int | None:
        """Return the first rank that failed, or None if no rank has failed.

        A rank that failed only because it lost another rank is returned only if there is no other
        failure.
        """
        failed = [rank for rank, status in self.ended.items() if status]
        return min(failed, key=lambda rank: self.ended[rank] == LOST, default=None)

    def end(self, signals: CaughtSignals) -> None:
        """End the ranks that are still running.

        The ranks get the signal that this process received, or SIGTERM if it received none. The
        method then waits for a limited time until the ranks have ended.
        """
        self._send(signals.first or signal.SIGTERM)
        seconds = SHUTDOWN_S if signals.first else _LEAVING_S
        deadline = time.monotonic() + seconds
        while self.run() and not signals.at_once:
            if time.monotonic() > deadline:
                say(f"killing the ranks that did not exit within {seconds} s")
                return
            time.sleep(_POLL_S)

    def _send(self, number: int) -> None:
        """Send a signal to all ranks that are still running, and to their child processes."""
        for rank, process in enumerate(self.processes):
            if rank not in self.ended:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
