"""The checks `machine` and `disk`: GPUs, processors, and space where runs are written."""

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bert_tools.common.machine import Machine, read_machine
from bert_tools.doctor.findings import Finding, fail, ok, warn
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.machine import usable_cpus

_GIB = 2**30
LEAST_FREE_BYTES, WANTED_FREE_BYTES = _GIB, 10 * _GIB  # a checkpoint of BERT-large has 4 GiB
Gpu = tuple[str, int]
"""A GPU as torch sees it: name, bytes of memory."""


def check_machine(config: RunConfig | None) -> list[Finding]:
    """Check the processors and GPUs of this machine. Raises ImportError without torch."""
    machine = read_machine()
    findings = [judge_processors(machine, len(usable_cpus()), _ranks(config))]
    import torch  # only now: without it the processors are still shown

    built_for = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    gpus = [(each.name, each.total_memory) for each in properties]
    return findings + judge_gpus(gpus, machine.num_gpus, built_for, config)


def judge_processors(machine: Machine, num_usable: int, ranks: int) -> Finding:
    """The finding on processors; this process may run on `num_usable` hardware threads."""
    name = "machine.cpu"
    found = (
        f"{machine.cpu_model or 'unknown processor'}, {machine.sockets} x "
        f"{machine.cores_per_socket} cores, {machine.memory_bytes / _GIB:.0f} GiB; "
        f"this process may use {num_usable} threads"
    )
    if num_usable < ranks:
        remedy = "ask for more CPUs per task (srun --cpus-per-task, docker --cpus), or fewer ranks"
        return warn(name, f"{found} for {ranks} ranks", remedy)
    return ok(name, found)


def judge_gpus(
    gpus: Sequence[Gpu], num_of_driver: int, built_for: str, config: RunConfig | None
) -> list[Finding]:
    """Findings on the GPUs that torch sees; `num_of_driver` is how many the driver lists."""
    name, wanted = "machine.gpus", None if config is None else config.run.device
    if not gpus and num_of_driver:
        found = f"the driver lists {num_of_driver} GPUs, {built_for} can use none"
        remedy = "install a torch for the CUDA of this driver; check CUDA_VISIBLE_DEVICES"
        return [fail(name, found, remedy)]
    if not gpus and wanted == "cuda":
        remedy = "use a machine with GPUs, or run.device 'cpu'; docker run needs --gpus all"
        return [fail(name, f"none, {built_for}; the config asks for 'cuda'", remedy)]
    if not gpus:
        return [ok(name, f"none, {built_for}: trains on the CPU")]
    kinds = Counter(f"{gpu[0]} {gpu[1] / _GIB:.0f} GiB" for gpu in gpus)
    found = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) + f", {built_for}"
    findings = [ok(name, found)]
    if len(kinds) > 1:
        findings = [warn(name, found, "ranks wait for the slowest GPU: use equal ones")]
    shares = config is None or wanted == "cpu" or config.parallel.share_gpu == "allow"
    if not shares and _ranks(config) > len(gpus):
        found = f"{len(gpus)} for {_ranks(config)} ranks per node of the config"
        findings.append(fail(name, found, "use the config of this machine's size"))
    return findings


def _ranks(config: RunConfig | None) -> int:
    return 1 if config is None else config.parallel.ranks_per_node


def check_disk(config: RunConfig | None) -> list[Finding]:
    """Check the free space of the current directory, below which runs are written."""
    here = Path.cwd()
    return [judge_free(here, shutil.disk_usage(here).free)]


def judge_free(where: Path, free_bytes: int) -> Finding:
    """The finding on free space for logs and a checkpoint."""
    name, found = "disk", f"{free_bytes / _GIB:,.1f} GiB free in {where}"
    remedy = "make room, or give --run-dir on another file system"
    if free_bytes < LEAST_FREE_BYTES:
        return fail(name, found + ", where runs are written", remedy)
    if free_bytes < WANTED_FREE_BYTES:
        return warn(name, found + ": a checkpoint of BERT-large has 4", remedy)
    return ok(name, found)
