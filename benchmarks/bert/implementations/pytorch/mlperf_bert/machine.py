"""Report the CPUs that this process may use, and their instructions, and manage its memory."""

import ctypes
import os
from pathlib import Path

# Linux's names for instructions that multiply matrices in bfloat16. A CPU without them is 7 to 10
# times as slow in bfloat16 as in fp32.
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")

# Numbers of glibc's settings in <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


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


def keep_freed_memory() -> None:
    """Let this process keep the memory of freed tensors for later tensors.

    Usually glibc returns large blocks to the system, which then has to clear their pages before the
    next tensor can use them. On a CPU, this can take a tenth of a training step. The setting has no
    effect with other C libraries. Source: the manual page mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


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
