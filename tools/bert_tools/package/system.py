"""The command `system`, which measures this machine and fills in its description in systems/."""

import argparse
import json
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bert_tools.package.own_checks import UNKNOWN, read_description, unknown_fields
from mlperf_bert.arguments import describe
from mlperf_bert.errors import ConfigError, one_line
from mlperf_bert.files import write_file
from mlperf_bert.machine import memory_bytes

_SOFTWARE = ("framework", "other_software_stack", "operating_system")
_LSCPU = {  # fields, with their names in lscpu
    "host_processors_per_node": "Socket(s)",
    "host_processor_model_name": "Model name",
    "host_processor_core_count": "Core(s) per socket",
    "host_processor_vcpu_count": "CPU(s)",
}
_GPU_VALUES = "name,memory.total,clocks.max.sm,pcie.link.gen.max,pcie.link.width.max,driver_version"
_NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={_GPU_VALUES}", "--format=csv,noheader")
_SYS = Path("/sys/class")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `system` to its parser."""
    describe(
        parser,
        f"Measure this machine, and write the values into systems/NAME.json where it says "
        f"'{UNKNOWN}'. The versions of software are always replaced. The command prints each "
        "changed field, and the fields that are still unknown.",
        "mlperf_bert system dgxa100_n1_pytorch",
    )
    parser.add_argument("name", metavar="NAME", help="system, described in systems/NAME.json")


def run(args: argparse.Namespace) -> int:
    """Fill in a description, and print its changes. Returns 0.

    Raises ConfigError if the description has more GPUs than this machine, and DataError if its file
    cannot be read or written.
    """
    path = Path("systems", f"{args.name}.json")
    description, problems = read_description(path, str(path))
    if problems:
        raise problems[0]
    gpus = [line.split(", ") for line in _lines(*_NVIDIA_SMI)]
    described = int(description["accelerators_per_node"])
    if len(gpus) < described:
        problem = f"has {described} accelerators per node, but nvidia-smi lists {len(gpus)}"
        raise ConfigError(args.name, problem, "run the command on a node of this system")
    measured = _processors() | _devices() | _gpu_and_software(gpus)
    if described and "CUDA" not in measured["other_software_stack"]:
        print("other_software_stack: not changed, because torch finds no GPU to ask about CUDA")
        measured.pop("other_software_stack")
    for field, old in description.items():
        new = one_line(measured.get(field, ""))
        if new and new != old and (field in _SOFTWARE or UNKNOWN in old):
            print(f"{field}: {one_line(old)} -> {new}")
            description[field] = new
        elif new and new != old and field == "accelerator_model_name":
            print(f"{field}: not changed from {one_line(old)}, but this machine has {new}")
    write_file(path, (json.dumps(description, indent=4) + "\n").encode())
    print(f"still unknown: {', '.join(unknown_fields(description)) or 'nothing'}")
    return 0


def _processors() -> dict[str, str]:
    """Measure the processors and the memory."""
    found = dict(re.findall(r"^ *(.+?): +(.+)$", "\n".join(_lines("lscpu")), re.MULTILINE))
    fields = {field: found.get(name, "") for field, name in _LSCPU.items()}
    caches = [(name, found.get(f"{name} cache")) for name in ("L1d", "L1i", "L2", "L3")]
    fields["host_processor_caches"] = ", ".join(f"{name} {size}" for name, size in caches if size)
    if clock := found.get("CPU max MHz"):  # a virtual machine has none
        fields["host_processor_frequency"] = f"{float(clock) / 1000:g} GHz (maximum)"
    if fields["host_processors_per_node"] == "1":
        fields["host_processor_interconnect"] = "none (one processor)"
    return fields | {"host_memory_capacity": f"{memory_bytes() / 2**30:.0f} GiB"}


def _devices() -> dict[str, str]:
    """Measure the disks, and the network cards with RDMA, or without any the other cards."""
    disks = []
    for line in _lines("lsblk", "-dbno", "NAME,SIZE,ROTA,TYPE"):
        name, size, rotates, kind = line.split()
        if kind == "disk" and int(size):
            disk = "NVMe SSD" if name.startswith("nvme") else "HDD" if rotates == "1" else "SSD"
            disk = "virtual disk" if name.startswith(("vd", "xvd")) else disk
            disks.append((disk, f"{int(size) / 1e12:.3g} TB {disk}"))
    ports = _SYS.glob("infiniband/*/ports/*")
    names = [(port / "link_layer", port / "rate") for port in ports]
    cards = [" ".join(file.read_text().strip() for file in files) for files in names]
    return {
        "host_storage_type": ", ".join(dict.fromkeys(kind for kind, _ in disks)),
        "host_storage_capacity": _counted(size for _, size in disks),
        "host_networking": _counted(cards or ["Ethernet" for _ in _SYS.glob("net/*/device")]),
    }


def _gpu_and_software(gpus: list[list[str]]) -> dict[str, str]:
    """Measure the first GPU, if there is one, and the versions of the software.

    `gpus` has the _GPU_VALUES of each GPU.
    """
    import torch

    fields = {
        "framework": f"PyTorch {torch.__version__}",
        "operating_system": platform.freedesktop_os_release()["PRETTY_NAME"],
        "sw_notes": "none",
    }
    versions = [f"Python {platform.python_version()}"]
    if torch.cuda.is_available():
        libraries: Any = torch  # torch does not type these
        nccl = ".".join(map(str, libraries.cuda.nccl.version()))
        cudnn = libraries.backends.cudnn.version()
        versions += [f"CUDA {torch.version.cuda}", f"cuDNN {cudnn}", f"NCCL {nccl}"]
        gpu = torch.cuda.get_device_properties(0)
        shared = f"{gpu.shared_memory_per_multiprocessor / 2**10:g} KiB shared memory per SM"
        memories = f"{gpu.L2_cache_size / 2**20:g} MiB L2 cache, {shared}"
        fields["accelerator_on-chip_memories"] = memories
    if gpus:
        name, memory, clock, generation, width, driver = gpus[0]
        versions.append(f"NVIDIA driver {driver}")
        fields["accelerator_model_name"] = name
        fields["accelerator_memory_capacity"] = memory
        if clock.endswith(" MHz"):  # unlike "[N/A]"
            fields["accelerator_frequency"] = f"{int(clock.split()[0]) / 1000:g} GHz (maximum)"
        if generation.isdecimal():
            fields["accelerator_host_interconnect"] = f"PCIe {generation}.0 x{width}"
    return fields | {"other_software_stack": ", ".join(versions)}


def _counted(things: Iterable[str]) -> str:
    """Join equal texts as `<number>x <text>`."""
    return ", ".join(f"{number}x {thing}" for thing, number in Counter(things).items())


def _lines(*command: str) -> list[str]:
    """Return the lines that a program prints in English, or [] if it is missing or fails."""
    words = ["env", "LC_ALL=C", *command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return [] if done.returncode else done.stdout.splitlines()
