"""Copies of other machines' /proc and /sys, as far as machine.py reads them."""

from collections.abc import Mapping
from pathlib import Path

_GPU_BUSES = ("07", "0f", "47", "4e", "87", "90", "b7", "bd")


def write_files(root: Path, files: Mapping[str, str]) -> Path:
    """Write each text at its path below `root`."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n", encoding="utf-8")
    return root


def processors(sockets: int, cores_per_socket: int, *, threads: int = 2) -> dict[str, str]:
    """CPUs numbered as Linux does: the first threads of all cores, then the second ones."""
    cores = sockets * cores_per_socket
    files = {"sys/devices/system/cpu/online": f"0-{cores * threads - 1}"}
    for cpu in range(cores * threads):
        core = cpu % cores
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = ",".join(str(core + thread * cores) for thread in range(threads))
        files[f"{topology}/physical_package_id"] = str(core // cores_per_socket)
        files[f"{topology}/thread_siblings_list"] = siblings
    return files


def dgx_a100(root: Path) -> Path:
    """Two EPYC 7742, eight GPUs and ten HCAs."""
    files = processors(2, 64)
    files["proc/cpuinfo"] = "processor\t: 0\nmodel name\t: AMD EPYC 7742 64-Core Processor"
    files["proc/meminfo"] = "MemTotal:       2113545604 kB\nMemFree:        1 kB"
    for index, (kind, size) in enumerate((("Data", 32), ("Instruction", 32), ("Unified", 512))):
        cache = f"sys/devices/system/cpu/cpu0/cache/index{index}"
        files |= {f"{cache}/type": kind, f"{cache}/size": f"{size}K"}
        files[f"{cache}/level"] = "2" if kind == "Unified" else "1"
    for bus in _GPU_BUSES:
        about = f"Model: \t\t NVIDIA A100-SXM4-80GB\nBus Location: \t 0000:{bus.upper()}:00.0"
        files[f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information"] = about
    files["proc/driver/nvidia/version"] = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
        "GCC version:  gcc version 9.4.0"
    )
    for index in range(10):
        card = f"sys/class/infiniband/mlx5_{index}"
        files[f"{card}/ports/1/link_layer"] = "InfiniBand"
        files[f"{card}/ports/1/rate"] = "200 Gb/sec (4X HDR)"
    files["sys/class/net/ib0/device/infiniband/mlx5_0/node_guid"] = "0"
    files["sys/class/net/enp226s0/device/vendor"] = "0x8086"
    files["sys/class/net/enp226s0/speed"] = "1000"
    files["sys/class/net/lo/speed"] = "-1"
    files["etc/os-release"] = 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 20.04.6 LTS"'
    files["proc/sys/kernel/osrelease"] = "5.4.0-144-generic"
    return write_files(root, files)


def laptop(root: Path) -> Path:
    """One socket, four cores of two threads, Wi-Fi that tells no speed."""
    files = processors(1, 4)
    files["proc/cpuinfo"] = "model name\t: Some Laptop CPU\ncpu MHz\t\t: 1800.500"
    files["proc/meminfo"] = "MemTotal: 16000000 kB"
    files["sys/class/net/wlan0/device/vendor"] = "0x8086"
    files["sys/devices/system/cpu/cpu0/cpufreq/base_frequency"] = "1900000"
    return write_files(root, files)
