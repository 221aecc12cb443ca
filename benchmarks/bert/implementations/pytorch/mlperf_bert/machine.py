"""The CPUs that this process may use, and the memory of the machine."""

import os


def usable_cpus() -> frozenset[int]:
    """Return the logical CPUs that this process may run on.

    Raises OSError if the system does not report them.
    """
    if hasattr(os, "sched_getaffinity"):  # only Linux has it, and it respects cpusets
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def memory_bytes() -> int:
    """Return the total memory of this machine in bytes, whether free or in use."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
