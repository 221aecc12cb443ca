"""Report the CPUs that this process may use, and the memory of the machine."""

import os


def usable_cpus() -> frozenset[int]:
    """Return the numbers of the logical CPUs on which this process may run.

    Raises OSError if the system does not report them.
    """
    if hasattr(os, "sched_getaffinity"):  # only Linux has it, and it respects cpusets
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def memory_bytes() -> int:
    """Return the total memory of this machine in bytes, both free and used."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
