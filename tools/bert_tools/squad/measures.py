"""Processor time and memory that a rank of a run uses."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from mlperf_bert.common.machine import usable_cpus
from mlperf_bert.run.metrics import memory_bytes


@contextmanager
def measured_usage(device: torch.device) -> Iterator[dict[str, Any]]:
    """Resources that this rank uses within; filled in at the end, as JSON can hold it.

    `cpu_seconds` are those of all threads of the process. `core_wait_seconds` is the time, summed
    over its threads, that they were ready and had no core; None if the system does not count it.
    `cpus` are the logical CPUs that the rank may run on, its own ones if it is bound. Beside them
    stands `peak_memory_bytes`, of the GPU if it is on one.
    """
    usage: dict[str, Any] = {}
    waited_before, cpu_begun = core_wait_seconds(), time.process_time()
    yield usage
    cpu, waited = time.process_time() - cpu_begun, core_wait_seconds()
    is_known = waited is not None and waited_before is not None
    usage |= {
        "cpu_seconds": cpu,
        "peak_memory_bytes": memory_bytes(device),
        "cpus": sorted(usable_cpus()),
        "core_wait_seconds": max(0.0, (waited or 0) - (waited_before or 0)) if is_known else None,
    }


def core_wait_seconds(tasks: Path = Path("/proc/self/task")) -> float | None:
    """Seconds that the process's present threads have waited for a core so far.

    Source: the second number of Linux's `schedstat`, in nanoseconds; None if there is none.
    """
    waited = 0
    try:
        for task in tasks.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                waited += int((task / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return waited / 1e9 if waited else None
