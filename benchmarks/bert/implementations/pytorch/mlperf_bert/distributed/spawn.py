"""Start the ranks of this machine, for a command that no launcher started.

torchrun's own agent, called as a library: it watches the ranks, and when one fails ends the others.
What it would print over a rank's own message is kept quiet; which rank failed first is said here.
"""

import dataclasses
import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from mlperf_bert.errors import ConfigError
from mlperf_bert.exit_statuses import INTERRUPTED, LOST, MISTAKE
from mlperf_bert.machine import memory_bytes
from mlperf_bert.messages import say
from mlperf_bert.signal_watch import CtrlC
from mlperf_bert.stop_request import SIGNALS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_RANK_BYTES = 256 * 2**20  # of Python and torch
SHUTDOWN_S = 110  # for ranks to save and leave; launch/docker.sh waits longer than that


def run_on_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    stopped_status: int | None = None,
    agreed_statuses: Sequence[int] = (),
) -> int:
    """Run `python -m mlperf_bert <arguments>` on ranks 0 .. num_ranks - 1 of this machine.

    Returns 0, or the exit status of the rank that failed first (128 + n for signal n). A line on
    stderr names that rank where it was killed; where the ranks have a `stopped_status`, also where
    it ended with anything but a user's mistake, that, or one of `agreed_statuses`.

    SIGTERM, SIGUSR1 and SIGINT to this process go to the ranks; SIGKILL follows SHUTDOWN_S later
    (30 s before torch could be told), and `stopped_status` is returned. Where that is None, the
    ranks do not end in order: they get SIGTERM, and 128 + n is returned. A second Ctrl-C ends this
    process, and with it the ranks, at once.

    Raises ConfigError for more ranks than the machine can hold.
    """
    _check_number(num_ranks)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",  # else the machine's own name, which need not resolve: containers
        max_restarts=0,
        monitor_interval=0.1,
        **_where_known(LaunchConfig),
    )
    came: list[int] = []
    try:
        with _passing_signals_on(came, in_order=stopped_status is not None):
            elastic_launch(config, sys.executable)("-m", "mlperf_bert", *arguments)
    except ChildFailedError as error:
        rank, failure = _first(error.failures)
        in_order = (MISTAKE, stopped_status, *agreed_statuses)
        if failure.exitcode < 0 or (stopped_status and failure.exitcode not in in_order):
            _say_first_cause(rank, failure)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        number = came[0] if came else int(error.sigval)
        return stopped_status if stopped_status and number in SIGNALS else 128 + number
    return 0


def _check_number(num_ranks: int) -> None:
    """Raise ConfigError for ranks that the machine cannot hold, whatever they do."""
    needed = num_ranks * _RANK_BYTES
    if needed > memory_bytes():
        has = f"this machine has {memory_bytes() / 2**30:,.0f}"
        problem = f"take {needed / 2**30:,.0f} GiB at least, {has}"
        raise ConfigError(f"{num_ranks:,} ranks", problem, "start fewer (parallel.ranks_per_node)")


@contextmanager
def _passing_signals_on(came: list[int], *, in_order: bool) -> Iterator[None]:
    """Note in `came` the signals that ask for an end, and have the agent send the first to ranks.

    Not the later ones: the agent would begin to wait for its ranks again.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    ctrl_c = CtrlC()

    def take(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and ctrl_c.came_again():
            os._exit(INTERRUPTED)
        came.append(number)
        if len(came) == 1:
            passed_on = signal.Signals(number) if in_order else signal.SIGTERM
            raise SignalException(f"{signal.Signals(number).name} came", passed_on)

    previous = {number: signal.signal(number, take) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _first(failures: "Mapping[int, ProcessFailure]") -> "tuple[int, ProcessFailure]":
    """The rank that failed first, and how.

    The agent looks ten times a second and notes whole seconds. A rank that only lost another may
    have ended within that time: it yields to one that did not, and was not ended by the agent.
    """
    ended_by_others = (LOST, -signal.SIGTERM)
    first_rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
    if first.exitcode in ended_by_others:
        for rank, failure in failures.items():
            is_as_early = failure.timestamp <= first.timestamp + 1
            if is_as_early and failure.exitcode not in ended_by_others:
                return rank, failure
    return first_rank, first


def _say_first_cause(rank: int, failure: "ProcessFailure") -> None:
    ended = f"ended with status {failure.exitcode}"
    if failure.exitcode < 0:
        ended = f"was killed by {signal.Signals(-failure.exitcode).name}"
    say(f"first cause: rank {rank} (pid {failure.pid}) {ended}")


def _where_known(config_class: type) -> dict[str, Any]:
    """Settings that older versions of torch do not have."""
    settings = {
        "shutdown_timeout": SHUTDOWN_S,
        "signals_to_handle": "SIGHUP,SIGQUIT",  # the others are taken here
    }
    known = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in settings.items() if name in known}
