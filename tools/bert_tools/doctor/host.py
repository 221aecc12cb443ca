"""The checks `machine`, `limits` and `caches`: processors, limits of ranks, the page cache."""

import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mlperf_bert.common.machine import Machine, format_cpu_list, read_machine, usable_cpus
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.network_test.findings import Finding, Options, fail, info, ok, warn

SHARED_MEMORY = Path("/dev/shm")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_GIB = 2**30
LEAST_SHARED_MEMORY = _GIB  # Docker's default is 64 MiB, too little for NCCL's ranks of a node
LEAST_OPEN_FILES = 8192  # the published data have up to 4,320 shards


def check_machine(options: Options) -> list[Finding]:
    """Check processors, NUMA nodes and cards, and the cores that ranks would be bound to."""
    machine, usable = read_machine(), usable_cpus()
    findings = judge_machine(machine, usable, options.config)
    if options.config is not None and options.config.parallel.binding == "none":
        return [*findings, ok("machine.binding", "none: the config asks for none")]
    return [*findings, judge_binding(_choices(machine, usable, options))]


def _choices(machine: Machine, usable: frozenset[int], options: Options) -> list[str]:
    """The CPUs of each rank of a run on this machine, or why it would not be bound, in words."""
    import torch

    from mlperf_bert.distributed.binding import choose_cpus, near_nodes

    on_gpus = options.wanted_device != "cpu" and torch.cuda.is_available()
    ranks = torch.cuda.device_count() if on_gpus else 1
    if options.config is not None:
        ranks = options.config.parallel.ranks_per_node
    near = near_nodes(machine, ranks, torch.device("cuda" if on_gpus else "cpu"))
    choices = [choose_cpus(machine, near, rank, usable) for rank in range(ranks)]
    return [
        choice if isinstance(choice, str) else f"CPUs {format_cpu_list(choice.cpus)}"
        for choice in choices
    ]


def judge_binding(choices: Sequence[str]) -> Finding:
    """The finding on binding; `choices` has `CPUs <list>` or a problem for each local rank."""
    unbound = sorted({choice for choice in choices if not choice.startswith("CPUs ")})
    if unbound:
        return ok("machine.binding", f"ranks are not bound: {'; '.join(unbound)}")
    words = [f"rank {rank} {choice}" for rank, choice in enumerate(choices)]
    return ok("machine.binding", ", ".join(words))


def judge_machine(
    machine: Machine, usable: frozenset[int], config: RunConfig | None
) -> list[Finding]:
    """Findings on the machine; `usable` are the CPUs that this process may run on."""
    findings = [_processors(machine, usable, config), _numa(machine)]
    if machine.nics:
        findings.append(ok("machine.nics", ", ".join(_nic_words(machine))))
    return findings


def _processors(machine: Machine, usable: frozenset[int], config: RunConfig | None) -> Finding:
    name = "machine.cpu"
    found = (
        f"{machine.cpu_model or 'unknown processor'}, {machine.sockets} x "
        f"{machine.cores_per_socket} cores, {machine.logical_cpus} threads, "
        f"{machine.memory_bytes / _GIB:.0f} GiB; this process may use {len(usable)} threads"
    )
    ranks = config.parallel.ranks_per_node if config else 1
    if len(usable) < ranks:
        remedy = "ask for more CPUs a task (srun --cpus-per-task, docker --cpus), or fewer ranks"
        return warn(name, f"{found} for {ranks} ranks", remedy)
    return ok(name, found)


def _numa(machine: Machine) -> Finding:
    name = "machine.numa"
    nodes = [
        f"{node.index}: CPUs {format_cpu_list(node.cpus) or 'none'}" for node in machine.numa_nodes
    ]
    found = f"{len(nodes)} nodes ({', '.join(nodes)})" if len(nodes) > 1 else "one node"
    near = [f"GPU {n} near {gpu.numa_node}" for n, gpu in enumerate(machine.gpus)]
    if len(nodes) < 2 or not near:
        return ok(name, found)
    if any(gpu.numa_node is None for gpu in machine.gpus):
        remedy = "ranks are bound in blocks; pass the topology on (VM), or update the firmware"
        return warn(name, f"{found}; which node is near a GPU is unknown", remedy)
    return ok(name, f"{found}; {', '.join(near)}")


def _nic_words(machine: Machine) -> list[str]:
    words = []
    for nic in machine.nics:
        rate = f"{nic.gbit_per_s:g} Gbit/s" if nic.gbit_per_s else "rate unknown"
        near = "" if nic.numa_node is None else f", node {nic.numa_node}"
        words.append(f"{nic.name} ({nic.kind}, {rate}{near})")
    return words


def check_limits(options: Options) -> list[Finding]:
    """Check shared memory, open files and locked memory."""
    shared = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None
    machine = read_machine()
    return judge_limits(
        shared_memory_bytes=shared,
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        locked_memory_bytes=_soft_limit(resource.RLIMIT_MEMLOCK),
        has_gpus=bool(machine.gpus),
        has_infiniband=any(nic.kind == "infiniband" for nic in machine.nics),
    )


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def judge_limits(
    *,
    shared_memory_bytes: int | None,
    open_files: int | None,
    locked_memory_bytes: int | None,
    has_gpus: bool,
    has_infiniband: bool,
) -> list[Finding]:
    """Findings on limits that are too low for ranks that share a machine.

    A number is None without a limit; for shared memory, without /dev/shm.
    """
    name, size = "limits.shared_memory", shared_memory_bytes
    found = "this system has no /dev/shm" if size is None else f"/dev/shm has {size / _GIB:.1f} GiB"
    remedy = "NCCL's ranks of a node share it: docker run --ipc=host, or --shm-size 8g"
    is_small = has_gpus and size is not None and size < LEAST_SHARED_MEMORY
    findings = [warn(name, found, remedy) if is_small else ok(name, found)]

    name, files = "limits.open_files", open_files
    remedy = f"a rank keeps a map of each shard open: ulimit -n {LEAST_OPEN_FILES}"
    is_few = files is not None and files < LEAST_OPEN_FILES
    found = str(files or "unlimited")
    lacks = warn if has_gpus else info  # sets for a CPU have few shards
    findings.append(lacks(name, found, remedy) if is_few else ok(name, found))

    name, size = "limits.locked_memory", locked_memory_bytes
    if has_infiniband and size is None:
        findings.append(ok(name, "unlimited, as InfiniBand wants it"))
    elif has_infiniband and size is not None:
        found = f"{size // 1024} KiB, and there is InfiniBand, which locks its buffers"
        remedy = "ulimit -l unlimited (limits.conf; docker run --ulimit memlock=-1)"
        findings.append(fail(name, found, remedy))
    return findings


def check_caches(options: Options) -> list[Finding]:
    """Check that the page cache may be dropped before a timed run."""
    is_closed = options.config is not None and options.config.mlperf.division == "closed"
    may_write = os.access(DROP_CACHES, os.W_OK)
    return [judge_caches(direct=may_write, by_sudo=_sudo_may_drop(), is_closed=is_closed)]


def _sudo_may_drop() -> bool:
    """True if sudo lets this user drop it without a password; nothing is dropped."""
    command = ["sudo", "-n", "-l", "sysctl", "vm.drop_caches=3"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def judge_caches(*, direct: bool, by_sudo: bool, is_closed: bool) -> Finding:
    """The finding on the page cache, as MLPerf logs must say if the caches were clear."""
    if direct or by_sudo:
        return ok("caches", "the page cache may be dropped" + ("" if direct else " through sudo"))
    found = "the page cache may not be dropped: the log will say that caches were not clear"
    judged = warn if is_closed else info
    return judged("caches", found, "run as root, or let sudo run `sysctl vm.drop_caches=3`")
