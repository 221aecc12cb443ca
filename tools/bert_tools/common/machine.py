"""Facts of this computer from /proc and /sys: processors, memory, GPUs.

Nothing here raises: a fact without a file, or missing from its file, stays empty or 0.
"""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

_MOST_BYTES = 1 << 16  # read per file; the longest repeats itself for every processor


@dataclass(frozen=True, slots=True)
class Machine:
    """One computer; `num_gpus` are those that NVIDIA's driver lists."""

    cpu_model: str
    sockets: int
    cores_per_socket: int
    memory_bytes: int
    num_gpus: int


def read_machine(root: Path = Path("/")) -> Machine:
    """Read the computer described by the files below `root`: this one, or a copy of another's."""
    sockets, cores = set(), set()
    for cpu in _names_in(root / "sys/devices/system/cpu"):
        # A CPU that is switched off has no topology.
        topology = root / "sys/devices/system/cpu" / cpu / "topology"
        if re.fullmatch("cpu[0-9]+", cpu) and topology.is_dir():
            sockets.add(_text(topology / "physical_package_id"))
            # The newer name first; some kernels have both.
            threads = _text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list")
            cores.add(threads or cpu)
    model = _field(_text(root / "proc/cpuinfo"), "model name")
    if root == Path("/"):  # also on systems without /proc
        model = model or platform.processor() or platform.machine()
    kilobytes = re.match("[0-9]{1,15}", _field(_text(root / "proc/meminfo"), "MemTotal"))
    return Machine(
        cpu_model=model,
        sockets=len(sockets),
        cores_per_socket=len(cores) // len(sockets) if sockets else 0,
        memory_bytes=1024 * int(kilobytes[0]) if kilobytes else 0,
        num_gpus=len(_names_in(root / "proc/driver/nvidia/gpus")),
    )


def _field(text: str, name: str) -> str:
    """The value of the first line `name : value`; empty if there is none."""
    match = re.search(rf"^{re.escape(name)}[ \t]*:[ \t]*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def _text(path: Path) -> str:
    """The stripped contents of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "".join(c for c in text if c.isprintable() or c in "\n\t").strip()


def _names_in(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
