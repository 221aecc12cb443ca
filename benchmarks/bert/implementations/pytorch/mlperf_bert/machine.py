"""How many processors this process may use, and how much memory the machine has."""

import os


def usable_cpus() -> frozenset[int]:
    """Logical CPUs that this process may run on. Raises OSError if the system does not say."""
    if hasattr(os, "sched_getaffinity"):  # Linux; it respects cgroups' cpusets and taskset
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def memory_bytes() -> int:
    """Total memory of this machine, free or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
