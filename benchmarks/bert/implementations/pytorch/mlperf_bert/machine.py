"""Report the CPUs that this process may use, their instructions, and the memory of the machine."""

import os
from pathlib import Path

# Linux's names for instructions that multiply matrices in bfloat16. A CPU without them is 7 to 10
# times as slow in bfloat16 as in fp32.
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")


def usable_cpus(pid: int = 0) -> frozenset[int]:
    """Return the numbers of the logical CPUs on which a process may run, by default this one.

    Raises OSError if the system does not report them.
    """
    if hasattr(os, "sched_getaffinity"):  # only Linux has it, and it respects cpusets
        return frozenset(os.sched_getaffinity(pid))
    return frozenset(range(os.cpu_count() or 1))


def memory_bytes() -> int:
    """Return the total memory of this machine in bytes, both free and used."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")


def bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return those of BF16_INSTRUCTIONS that this CPU has.

    The list is empty if the system has no `cpuinfo` file, as every system except Linux.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return [name for name in BF16_INSTRUCTIONS if name in flags]
