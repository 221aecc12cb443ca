"""Start the ranks of this machine, for a command that no launcher started.

torchrun's own agent, called as a library: it watches the ranks, and when one fails ends the others.
What it would print over a rank's own message is kept quiet.
"""

import dataclasses
import logging
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any

SHUTDOWN_S = 110  # for ranks to save and leave; launch/docker.sh waits longer than that


def run_on_ranks(
    arguments: Sequence[str], num_ranks: int, *, stopped_status: int = 128 + signal.SIGTERM
) -> int:
    """Run `python -m mlperf_bert <arguments>` on ranks 0 .. num_ranks - 1 of this machine.

    Returns 0, or the exit status of the rank that failed first (128 + n for signal n). SIGTERM and
    SIGUSR1 to this process go to the ranks, SIGKILL follows SHUTDOWN_S later (30 s before torch
    could be told), and `stopped_status` is returned.
    """
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
    try:
        elastic_launch(config, sys.executable)("-m", "mlperf_bert", *arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        asked_to_stop = error.sigval in (signal.SIGTERM, signal.SIGUSR1)
        return stopped_status if asked_to_stop else 128 + int(error.sigval)
    return 0


def _where_known(config_class: type) -> dict[str, Any]:
    """Settings that older versions of torch do not have."""
    settings = {
        "shutdown_timeout": SHUTDOWN_S,
        "signals_to_handle": "SIGTERM,SIGHUP,SIGQUIT,SIGUSR1",  # Ctrl-C is Python's own affair
    }
    known = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in settings.items() if name in known}
