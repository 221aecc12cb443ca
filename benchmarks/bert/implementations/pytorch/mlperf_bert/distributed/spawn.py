"""Our own launcher: start and supervise this machine's ranks for a command.

They meet through a file in a private directory of the user and talk over the loopback interface: no
store listens, and nobody else can leave them data.
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
from mlperf_bert.distributed.signal_watch import CaughtSignals, end_with_parent
from mlperf_bert.errors import INTERRUPTED, LOST, MISTAKE, STOPPED, ConfigError, say
from mlperf_bert.machine import memory_bytes

_RANK_BYTES = 256 * 2**20  # memory of Python and torch
SHUTDOWN_S = 110  # for ranks to save and leave; launch/docker.sh waits longer
_LEAVING_S = 20  # for ranks to leave after one has failed
_POLL_S = 0.05
_LOOPBACK_S = 5
_YIELDS_S = 1.0  # to see a rank that failed by itself after one that only lost it


def run_on_ranks(
    arguments: Sequence[str], num_ranks: int, *, agreed_statuses: Collection[int] = (STOPPED,)
) -> int:
    """Run `python -P -m mlperf_bert <arguments>` on ranks 0 .. num_ranks - 1 of this machine.

    Returns 0, or the exit status of the rank that failed first (128 + n for signal n), after which
    the others get SIGTERM, and SIGKILL _LEAVING_S later. A line on stderr names that rank, unless
    it ended with a user's mistake, or with one of `agreed_statuses`, which all ranks share.

    SIGTERM, SIGUSR1, SIGHUP and SIGINT to this process go to the ranks, and SIGKILL follows
    SHUTDOWN_S later. It then returns STOPPED, 0 if all had finished, or a user's mistake. A second
    Ctrl-C ends the ranks and this process at once; on Linux they also end when it is killed.

    Raises ConfigError if ranks cannot be started, or are more than the machine can hold.
    """
    _check_number(num_ranks)
    if num_ranks > 1:
        _check_loopback()
    with CaughtSignals() as signals, _place_to_meet() as directory, _Ranks() as ranks:
        ranks.start(arguments, num_ranks, f"{directory}/store")
        yielding = (*agreed_statuses, LOST, MISTAKE)
        while ranks.run() and not signals.first and not ranks.have_failed(yielding):
            time.sleep(_POLL_S)
        first = ranks.first_failure()
        ranks.end(signals)
        if signals.at_once:
            return INTERRUPTED
        if signals.first:
            return _after_signal(ranks, signals.first, agreed_statuses)
        if first is None:
            return 0
        status = ranks.ended[first]
        if status not in (MISTAKE, *agreed_statuses):
            how = f"ended with status {status}"
            if status < 0:
                how = f"was killed by {signal.Signals(-status).name}"
            say(f"first cause: rank {first} (pid {ranks.processes[first].pid}) {how}")
        return status if status >= 0 else 128 - status


def _check_number(num_ranks: int) -> None:
    """Raise ConfigError for more ranks than the machine can hold, whatever they do."""
    needed = num_ranks * _RANK_BYTES
    if needed > memory_bytes():
        has = f"this machine has {memory_bytes() / 2**30:,.0f}"
        problem = f"take {needed / 2**30:,.0f} GiB at least, {has}"
        raise ConfigError(f"{num_ranks:,} ranks", problem, "start fewer (parallel.ranks_per_node)")


def _check_loopback() -> None:
    """Raise ConfigError if processes of this machine cannot reach each other.

    In a sandbox the loopback interface may be down, which gloo reports as a lost rank.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_S).close()
    except OSError as error:
        problem = f"the loopback interface cannot be used (127.0.0.1: {error.strerror or error})"
        remedy = "bring it up (ip link set lo up), or train with one rank: --set "
        remedy += "parallel.ranks_per_node=1"
        raise ConfigError("network", problem, remedy) from None


def _after_signal(ranks: "_Ranks", number: int, agreed_statuses: Collection[int]) -> int:
    statuses = list(ranks.ended.values())
    if len(statuses) < len(ranks.processes):  # already reported
        return STOPPED
    if all(status == -number for status in statuses):  # too early to report it themselves
        say(f"{signal.Signals(number).name} before the first step: nothing to save")
    if not any(statuses):
        return 0
    return next((each for each in (MISTAKE, *agreed_statuses) if each in statuses), STOPPED)


@contextmanager
def _place_to_meet() -> Iterator[Path]:
    """A directory of mode 0700."""
    try:
        directory = Path(tempfile.mkdtemp(prefix="mlperf_bert-"))
    except OSError as error:
        problem = f"cannot be written ({error.strerror}), and ranks meet there"
        raise ConfigError("the directory for temporary files", problem, "set TMPDIR") from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _environment(rank: int, num_ranks: int, meeting: str) -> dict[str, str]:
    own = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
    # Linux's and macOS's names of the loopback interface, for gloo's and NCCL's sockets.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    # NCCL takes a name as a prefix, unless it follows "=".
    interfaces = {"GLOO_SOCKET_IFNAME": loopback[0], "NCCL_SOCKET_IFNAME": f"={loopback[0]}"}
    return {
        **os.environ,
        **{name: str(n) for name, n in own.items()},
        **interfaces,
        MEETING: meeting,
    }


class _Ranks:
    """The processes, killed when the context is left."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ended: dict[int, int] = {}  # rank to status, -n for signal n, in the order seen
        self._failed_at: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGKILL)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):  # lost storage blocks even killed processes
                process.wait(timeout=5)

    def start(self, arguments: Sequence[str], count: int, meeting: str) -> None:
        """Start all ranks from the main thread; they end when it ends."""
        for rank in range(count):
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "mlperf_bert", *arguments],
                    env=_environment(rank, count, meeting),
                    start_new_session=True,  # a terminal's signals come from this process only
                    preexec_fn=partial(end_with_parent, os.getpid()),
                )
            except (OSError, subprocess.SubprocessError) as error:
                problem = f"rank {rank} of {count} cannot be started ({error})"
                raise ConfigError("ranks", problem, "use fewer, or raise ulimit -u") from None
            self.processes.append(process)

    def run(self) -> bool:
        """True while any rank runs; to be polled."""
        for rank, process in enumerate(self.processes):
            if rank not in self.ended and process.poll() is not None:
                self.ended[rank] = process.returncode
        return len(self.ended) < len(self.processes)

    def have_failed(self, yielding: Collection[int]) -> bool:
        """True if a rank has failed; one with a yielding status counts only after a second.

        Meanwhile the rank that is the cause ends, unless it has ended before.
        """
        failed = [status for status in self.ended.values() if status]
        if failed and self._failed_at is None:
            self._failed_at = time.monotonic()
        return any(status not in yielding for status in failed) or (
            self._failed_at is not None and time.monotonic() - self._failed_at > _YIELDS_S
        )

    def first_failure(self) -> int | None:
        """The rank that failed first so far; one that only lost others yields."""
        failed = [rank for rank, status in self.ended.items() if status]
        return min(failed, key=lambda rank: self.ended[rank] == LOST, default=None)

    def end(self, signals: CaughtSignals) -> None:
        """End the running ranks, by the signal that came or else by SIGTERM."""
        self._send(signals.first or signal.SIGTERM)
        seconds = SHUTDOWN_S if signals.first else _LEAVING_S
        deadline = time.monotonic() + seconds
        while self.run() and not signals.at_once:
            if time.monotonic() > deadline:
                say(f"ranks did not end within {seconds} s, and are killed")
                return
            time.sleep(_POLL_S)

    def _send(self, number: int) -> None:
        """Send a signal to all running ranks and their children."""
        for rank, process in enumerate(self.processes):
            if rank not in self.ended:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
