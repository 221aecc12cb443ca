"""Facts of this computer from /proc and /sys: processors, memory, GPUs, network cards.

Nothing here raises: a fact without a file, or missing from its file, stays empty.
"""

import os
import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

_MOST_BYTES = 1 << 16  # read per file; the longest repeats itself for every processor
_MOST_CPUS = 1 << 14  # Linux is built for at most 8,192
Kind = Literal["infiniband", "ethernet"]
_CPU_DIRECTORY = "sys/devices/system/cpu"


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU; `pci_bus_id` as in sysfs, such as 0000:07:00.0."""

    name: str
    pci_bus_id: str


@dataclass(frozen=True, slots=True)
class Nic:
    """A port of a network card, with the present rate of its link, or None if not known.

    A port with RDMA has the name and the rate of its device in /sys/class/infiniband; `kind` is the
    type of its link.
    """

    name: str
    kind: Kind
    gbit_per_s: float | None


@dataclass(frozen=True, slots=True)
class Machine:
    """One computer. CPUs are the numbers of online logical CPUs, hardware threads included.

    `cpu_mhz` is the base frequency if the kernel reports it, else the first core's present
    frequency; `caches` has the size of one instance of each cache; `cores` has the hardware threads
    of each core.
    """

    cpu_model: str
    sockets: int
    cores_per_socket: int
    logical_cpus: int
    cpu_mhz: float | None
    caches: str
    memory_bytes: int
    cores: tuple[tuple[int, ...], ...]
    gpus: tuple[Gpu, ...]
    driver: str | None
    nics: tuple[Nic, ...]
    os: str
    kernel: str


def read_machine(root: Path = Path("/")) -> Machine:
    """Read the computer described by the files below `root`: this one, or a copy of another's."""
    of_cpus = root / _CPU_DIRECTORY
    cpus = parse_cpu_list(_text(of_cpus / "online"))
    cores = _cores(of_cpus, cpus)
    package = "topology/physical_package_id"
    sockets = len({_integer(_text(of_cpus / f"cpu{cpu}" / package)) or 0 for cpu in cpus})
    machine = Machine(
        cpu_model=_field(_text(root / "proc/cpuinfo"), "model name"),
        sockets=sockets,
        cores_per_socket=len(cores) // sockets if sockets else 0,
        logical_cpus=len(cpus),
        cpu_mhz=_cpu_mhz(root),
        caches=_caches(root),
        memory_bytes=1024 * (_integer(_field(_text(root / "proc/meminfo"), "MemTotal")) or 0),
        cores=cores,
        gpus=_gpus(root),
        driver=_driver(root),
        nics=_rdma_ports(root) + _ethernet_ports(root),
        os=_os_name(root),
        kernel=_text(root / "proc/sys/kernel/osrelease"),
    )
    return _with_platform(machine) if root == Path("/") else machine


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The CPUs of a kernel list such as `0-3,64-67`, in order; () if it is no such list."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        if match is None:
            return ()
        cpus.update(range(int(match[1]), min(int(match[2] or match[1]), _MOST_CPUS) + 1))
    return tuple(sorted(cpus))


def _with_platform(machine: Machine) -> Machine:
    """This machine with facts from Python, for systems without /proc."""
    cpus = tuple(range(os.cpu_count() or 1))
    if not machine.logical_cpus:
        machine = replace(machine, logical_cpus=len(cpus), cores=tuple((cpu,) for cpu in cpus))
    return replace(
        machine,
        cpu_model=machine.cpu_model or platform.processor() or platform.machine(),
        os=machine.os or f"{platform.system()} {platform.release()}".strip(),
        kernel=machine.kernel or platform.release(),
    )


def _cores(of_cpus: Path, cpus: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    unassigned = set(cpus)
    cores = []
    for cpu in cpus:
        if cpu in unassigned:
            # The newer name first; some kernels have both.
            names = ("core_cpus_list", "thread_siblings_list")
            told = (_text(of_cpus / f"cpu{cpu}/topology" / name) for name in names)
            siblings = next(filter(None, told), "")
            core = unassigned.intersection(parse_cpu_list(siblings)) | {cpu}
            unassigned -= core
            cores.append(tuple(sorted(core)))
    return tuple(cores)


def _cpu_mhz(root: Path) -> float | None:
    base_khz = _number(_text(root / _CPU_DIRECTORY / "cpu0/cpufreq/base_frequency"))
    if base_khz:
        return base_khz / 1000
    return _number(_field(_text(root / "proc/cpuinfo"), "cpu MHz"))


def _caches(root: Path) -> str:
    words = []
    for cache in _entries(root / _CPU_DIRECTORY / "cpu0/cache", "index"):
        level, kilobytes = _integer(_text(cache / "level")), _integer(_text(cache / "size"))
        kind = {"Data": "d", "Instruction": "i"}.get(_text(cache / "type"), "")
        if level and kilobytes:
            whole = kilobytes % 1024 == 0
            size = f"{kilobytes // 1024} MiB" if whole else f"{kilobytes} KiB"
            words.append(f"L{level}{kind} {size}")
    return ", ".join(words)


def _gpus(root: Path) -> tuple[Gpu, ...]:
    gpus = []
    for directory in _entries(root / "proc/driver/nvidia/gpus"):
        about = _text(directory / "information")
        bus_id = (_field(about, "Bus Location") or directory.name).lower()
        gpus.append(Gpu(_field(about, "Model"), bus_id))
    return tuple(sorted(gpus, key=lambda gpu: gpu.pci_bus_id))  # the names are hexadecimal


def _driver(root: Path) -> str | None:
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  <date>", or with "Open".
    about = _text(root / "proc/driver/nvidia/version")
    match = re.search(r"Kernel Module.*?\s([0-9]+(?:\.[0-9]+)+)", about)
    return match[1] if match else None


def _rdma_ports(root: Path) -> tuple[Nic, ...]:
    nics = []
    for directory in _entries(root / "sys/class/infiniband"):
        for port in _entries(directory / "ports"):
            kind: Kind = "infiniband"
            if _text(port / "link_layer") == "Ethernet":
                kind = "ethernet"
            nics.append(Nic(directory.name, kind, _number(_text(port / "rate")) or None))
    return tuple(nics)


def _ethernet_ports(root: Path) -> tuple[Nic, ...]:
    nics = []
    for directory in _entries(root / "sys/class/net"):
        device = directory / "device"
        # Virtual cards have no device; a card with infiniband/ has been read already.
        if device.is_dir() and not (device / "infiniband").is_dir():
            mbit_per_s = _number(_text(directory / "speed"))
            rate = mbit_per_s / 1000 if mbit_per_s else None
            nics.append(Nic(directory.name, "ethernet", rate))
    return tuple(nics)


def _os_name(root: Path) -> str:
    match = re.search(r"^PRETTY_NAME=(.*)$", _text(root / "etc/os-release"), re.MULTILINE)
    return match[1].strip().strip("\"'") if match else ""


def _field(text: str, name: str) -> str:
    """The value of the first line `name : value`; empty if there is none."""
    match = re.search(rf"^{re.escape(name)}[ \t]*:[ \t]*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def _number(text: str) -> float | None:
    """The number at the start of a text, such as 200 in `200 Gb/sec`; None below zero."""
    match = re.match(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)", text)
    return float(match[1]) if match else None


def _integer(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


def _text(path: Path) -> str:
    """The stripped contents of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError):  # ValueError: a path with a null byte
        return ""
    return "".join(c for c in text if c.isprintable() or c in "\n\t").strip()


def _entries(directory: Path, prefix: str = "") -> list[Path]:
    """The entries named `<prefix>...`, or `<prefix><number>`, ordered by their numbers."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    if prefix:
        names = [name for name in names if re.fullmatch(rf"{prefix}[0-9]{{1,6}}", name)]
    return [directory / name for name in sorted(names, key=_by_number)]


def _by_number(name: str) -> list[str | int]:
    parts = re.split(r"([0-9]+)", name)  # odd positions are numbers
    return [int(part) if n % 2 else part for n, part in enumerate(parts)]
