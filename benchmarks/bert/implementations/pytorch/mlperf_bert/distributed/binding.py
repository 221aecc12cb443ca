"""Device, cores and memory of a rank: near its GPU, shared out among the node's ranks.

The reasons, also for setting no variable of NCCL or UCX: docs/decisions/0013-binding.md.
"""

import ctypes
import os
import platform
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.machine import Machine, NumaNode, format_cpu_list, read_machine, usable_cpus
from mlperf_bert.distributed.launch import RankInfo

# The system call's number by Linux's tables, its mode, and the most nodes it can name.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_PREFERRED = 1
_MOST_NODES = 1024


@dataclass(frozen=True, slots=True)
class Choice:
    """A rank's share: whole cores, as numbers of logical CPUs, and their NUMA nodes."""

    cpus: tuple[int, ...]
    num_cores: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """A binding in words; `num_cores` belong to this rank alone, None if nothing was bound."""

    words: str
    num_cores: int | None = None


NOT_ASKED = Binding("not bound: parallel.binding is 'none'")


def choose_device(
    name: Literal["auto", "cpu", "cuda"],
    info: RankInfo,
    share_gpu: Literal["refuse", "allow"] = "refuse",
) -> torch.device:
    """The device of this rank: `cuda:<local_rank>` or `cpu`; `auto` takes CUDA if present.

    Raises ConfigError for `cuda` without CUDA, and for more ranks on the node than GPUs unless
    they may share.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("run.device", "is 'cuda' but no CUDA device is usable", "use 'cpu'")
    gpus = torch.cuda.device_count()
    if info.local_world_size > gpus and share_gpu == "refuse":
        raise ConfigError(
            "run.device",
            f"{info.local_world_size} ranks on this node see {gpus} GPUs",
            "start one rank a GPU and let each see all (srun: --gpus-per-node, not per task)",
        )
    return torch.device("cuda", info.local_rank % gpus)


def bind(info: RankInfo, device: torch.device, machine: Machine | None = None) -> Binding:
    """Bind this process and its future threads to cores and memory of its own.

    Parts that cannot be bound are left alone, and the words say why.
    """
    if not hasattr(os, "sched_setaffinity"):
        return Binding("not bound: this system cannot bind processes")
    machine = machine or read_machine()
    near = near_nodes(machine, info.local_world_size, device)
    try:
        choice = choose_cpus(machine, near, info.local_rank, usable_cpus())
        if isinstance(choice, str):
            return Binding(f"not bound: {choice}")
        os.sched_setaffinity(0, choice.cpus)
    except OSError as error:
        return Binding(f"not bound: {error.strerror}")
    refused = _prefer_memory(choice.nodes)
    memory = f"memory left to the system ({refused})" if refused else "memory there"
    nodes = f"NUMA node{'s' * (len(choice.nodes) > 1)} {format_cpu_list(choice.nodes)}"
    words = f"CPUs {format_cpu_list(choice.cpus)} of {nodes}, {memory}"
    near_cards = (nic for nic in machine.nics if nic.numa_node in choice.nodes)
    cards = [nic.name for nic in near_cards if nic.kind == "infiniband"]
    return Binding(f"{words}, near {', '.join(cards)}" if cards else words, choice.num_cores)


def near_nodes(machine: Machine, local_ranks: int, device: torch.device) -> list[int | None]:
    """The NUMA node near each local rank's GPU; None for a CPU or if unknown."""
    if device.type != "cuda":
        return [None] * local_ranks
    node_of = {gpu.pci_bus_id: gpu.numa_node for gpu in machine.gpus}
    with_cpus = [node.index for node in machine.numa_nodes if node.cpus]
    only = with_cpus[0] if len(with_cpus) == 1 else None
    num_gpus = torch.cuda.device_count()
    found = [node_of.get(_pci_bus_id(rank % num_gpus)) for rank in range(local_ranks)]
    return [only if node is None else node for node in found]


def choose_cpus(
    machine: Machine, near: Sequence[int | None], local_rank: int, allowed: Set[int]
) -> Choice | str:
    """The cores of a rank, or the reason to leave it unbound.

    Args:
        machine: the computer.
        near: the NUMA node of each local rank's GPU. Ranks without one get a block of the nodes:
            with 8 nodes, 4 ranks get 2 each, and 16 ranks share one for two.
        local_rank: number of the rank on this machine.
        allowed: logical CPUs this process may run on now.

    Ranks of one node share its cores evenly and in order, none twice; a core comes with its allowed
    hardware threads.
    """
    nodes = [node for node in machine.numa_nodes if node.cpus]
    if len(nodes) < 2 and all(node is None for node in near):
        return "one NUMA node and no GPU"
    if not nodes:
        return "the NUMA nodes are unknown"
    if len(allowed) < machine.logical_cpus and len(allowed) * len(near) <= machine.logical_cpus:
        return f"started with CPUs {format_cpu_list(sorted(allowed))} of {machine.logical_cpus}"
    wanted = [_wanted(nodes, near, rank) for rank in range(len(near))]
    cores: list[tuple[int, ...]] = []
    for node in wanted[local_rank]:
        sharers = [rank for rank, its in enumerate(wanted) if node in its]
        usable = _allowed_cores(machine, node, allowed)
        place = sharers.index(local_rank)
        first, end = (len(usable) * n // len(sharers) for n in (place, place + 1))
        cores += usable[first:end]
    names = format_cpu_list([node.index for node in wanted[local_rank]])
    if not cores:
        return f"too few of the allowed CPUs are on NUMA node {names}"
    cpus = tuple(sorted(cpu for core in cores for cpu in core))
    return Choice(cpus, len(cores), tuple(node.index for node in wanted[local_rank]))


def _wanted(nodes: list[NumaNode], near: Sequence[int | None], rank: int) -> list[NumaNode]:
    """The nodes that a rank takes cores from: its GPU's, or its block of all."""
    its_own = [node for node in nodes if node.index == near[rank]]
    if its_own:
        return its_own
    first = rank * len(nodes) // len(near)
    end = (rank + 1) * len(nodes) // len(near)
    return nodes[first : max(end, first + 1)]


def _allowed_cores(machine: Machine, node: NumaNode, allowed: Set[int]) -> list[tuple[int, ...]]:
    usable = allowed & set(node.cpus)
    cores = (tuple(cpu for cpu in core if cpu in usable) for core in machine.cores)
    return [core for core in cores if core]


def _pci_bus_id(index: int) -> str:
    """A GPU's PCI bus id as in sysfs; empty if this torch does not tell."""
    about: Any = torch.cuda.get_device_properties(index)
    if not all(hasattr(about, f"pci_{part}_id") for part in ("domain", "bus", "device")):
        return ""
    return f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"


def _prefer_memory(nodes: tuple[int, ...]) -> str:
    """Prefer this node's memory; return the reason if the system refuses.

    With several nodes nothing is set: the system gives memory of the node where a thread runs.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    node = nodes[0]
    is_64_bit = ctypes.sizeof(ctypes.c_long) == 8
    if len(nodes) > 1 or number is None or not is_64_bit or node >= _MOST_NODES:
        return ""
    words = [0] * (_MOST_NODES // 64)
    words[node // 64] = 1 << (node % 64)
    mask = (ctypes.c_ulong * len(words))(*words)
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    status = syscall(
        ctypes.c_long(number), ctypes.c_int(_PREFERRED), mask, ctypes.c_ulong(_MOST_NODES)
    )
    return os.strerror(ctypes.get_errno()) if status else ""
