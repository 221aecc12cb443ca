"""The sub-command `doctor`: machine, packages, disk, and one all-reduce between ranks."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlperf_bert.arguments import describe
from mlperf_bert.config.files import add_config, load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.launch import shadowed_packages
from mlperf_bert.errors import ConfigError, UserError
from mlperf_bert.machine import memory_bytes, usable_cpus

Status = Literal["ok", "warn", "fail"]
Gpu = tuple[str, int]
"""A GPU as torch sees it: name, bytes of memory."""
_NAME_WIDTH = 23
_GIB = 2**30
LEAST_FREE_BYTES, WANTED_FREE_BYTES = _GIB, 10 * _GIB  # a checkpoint of BERT-large has 4 GiB
_INSTALL = "run in the checkout: tools/venv.sh"
_LEAST_RANKS = 2  # of the all-reduce
EXIT_REFUSED = 1  # something fails; schedulers read this


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; `name` is the check's, or `<check>.<part>`.

    `remedy` is empty where the status is `ok`.
    """

    status: Status
    name: str
    found: str
    remedy: str = ""

    def line(self) -> str:
        """The finding as a line for people."""
        text = f"{self.status:<4}  {self.name:<{_NAME_WIDTH}}  {' '.join(self.found.split())}"
        return text + (f"; {self.remedy}" if self.remedy else "")


def ok(name: str, found: str) -> Finding:
    """A finding that all is well."""
    return Finding("ok", name, found)


def warn(name: str, found: str, remedy: str) -> Finding:
    """A finding with which training runs, but slower or with less."""
    return Finding("warn", name, found, remedy)


def fail(name: str, found: str, remedy: str) -> Finding:
    """A finding with which training does not run, or not correctly."""
    return Finding("fail", name, found, remedy)


def cpu_model() -> str:
    """The name of this computer's processor, also on systems without /proc."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name[ \t]*:[ \t]*(.*)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine() or "unknown"


def gpus_of_driver() -> int:
    """How many GPUs NVIDIA's driver lists."""
    with suppress(OSError):
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    return 0


def check_machine(config: RunConfig | None) -> list[Finding]:
    """Check the processors and GPUs of this machine. Raises ImportError without torch."""
    findings = [judge_processors(len(usable_cpus()), _ranks(config))]
    import torch  # only now: without it the processors are still shown

    built_for = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    gpus = [(each.name, each.total_memory) for each in properties]
    return findings + judge_gpus(gpus, gpus_of_driver(), built_for, config)


def judge_processors(num_usable: int, ranks: int) -> Finding:
    """The finding on processors; this process may run on `num_usable` hardware threads."""
    name = "machine.cpu"
    found = (
        f"{cpu_model()}, {memory_bytes() / _GIB:.0f} GiB; this process may use {num_usable} threads"
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


@dataclass(frozen=True, slots=True)
class Package:
    """A package: `cost` is lost without it; `source` installs it; needed if that is empty.

    It was tried from version `lowest` on, below `below`.
    """

    name: str
    module: str
    cost: str
    lowest: tuple[int, ...] = ()
    below: tuple[int, ...] = ()
    source: str = ""


NEEDED = (
    Package("torch", "torch", "trains nothing", (2, 11), (2, 14)),
    Package("numpy", "numpy", "trains nothing", (2, 0)),
    Package("numba", "numba", "trains nothing", (0, 61)),
    Package("h5py", "h5py", "prepares no data", (3, 12)),
    Package("safetensors", "safetensors", "saves no weights", (0, 8)),
    Package("mlperf-logging", "mlperf_logging", "writes no log", (4, 1, 68)),
    Package("scipy", "scipy", "fits no curve", (1, 15)),
    Package("google-crc32c", "google_crc32c", "reads no TensorFlow file", (1, 7)),
    Package("jinja2", "jinja2", "writes no report page", (3, 1, 6)),
    Package("rich", "rich", "prints no tables", (13,)),
)
OPTIONAL = (
    # The module is compiled; the project called apex on PyPI is something else.
    Package(
        "apex", "amp_C", "no optim.implementation 'apex'", source="an image that has NVIDIA's apex"
    ),
    Package("nvidia-dali", "nvidia.dali", "no data.loader 'dali'", source="extra 'dali'"),
    Package("triton", "triton", "no fused kernels on a GPU", source="triton"),
    Package("mpi4py", "mpi4py", "no data.loader 'mpi_readers'", source="extra 'mpi' and an MPI"),
)


def check_packages(config: RunConfig | None) -> list[Finding]:
    """Check the packages that are needed everywhere, and those that this config or a GPU needs."""
    needed = needed_here(config, has_gpus=gpus_of_driver() > 0)
    packages = [*NEEDED, *(package for package in OPTIONAL if package.name in needed)]
    elsewhere = {name: directory for directory, name in shadowed_packages()}
    findings = []
    for package in packages:
        if package.module in elsewhere:  # its version is not that of the environment's
            found = f"Python takes another, of PYTHONPATH: {elsewhere[package.module]}"
            findings.append(fail(f"packages.{package.name}", found, "unset PYTHONPATH"))
        else:
            findings.append(judge(package, installed_version(package)))
    return findings


def needed_here(config: RunConfig | None, *, has_gpus: bool) -> set[str]:
    """The optional packages that the config, or a GPU, needs."""
    needed = {"triton"} if has_gpus else set()
    if config is not None:
        choices = {"apex": "apex", "dali": "nvidia-dali", "mpi_readers": "mpi4py"}
        chosen = {config.optim.implementation, config.data.loader}
        needed |= {choices[each] for each in chosen & choices.keys()}
    return needed


def judge(package: Package, version: str | None) -> Finding:
    """The finding on a package; `version` is None if not installed, empty if not known."""
    name = f"packages.{package.name}"
    if version is None and package.source:
        return warn(name, f"not found: {package.cost}", f"if you need it: {package.source}")
    if version is None:
        return fail(name, f"missing: {package.cost}", _INSTALL)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
    if numbers and (numbers < package.lowest or (package.below and numbers >= package.below)):
        bounds = ((">=", package.lowest), ("<", package.below))
        tried = ",".join(sign + ".".join(map(str, each)) for sign, each in bounds if each)
        remedy = f"not tried with this one, but with {package.name}{tried}; {_INSTALL}"
        return warn(name, version, remedy)
    return ok(name, version or "installed")


def installed_version(package: Package) -> str | None:
    """The version of a package, empty if it has none, None if the module is not found."""
    try:
        spec = importlib.util.find_spec(package.module)
    except (ImportError, ValueError):  # a part of a package that is not there
        spec = None
    if spec is None:
        return None
    for name in (package.name, package.module):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def check_all_reduce(config: RunConfig | None) -> list[Finding]:
    """Start ranks of this machine, which print what they find: the config's, one per GPU, or two.

    Raises ConfigError for more ranks than the machine can hold.
    """
    from mlperf_bert.distributed.spawn import run_on_ranks

    device, ranks = "auto", gpus_of_driver()
    if config is not None:
        device, ranks = config.run.device, config.parallel.ranks_per_node
    settings = (f"run.device={device}", f"parallel.ranks_per_node={max(ranks, _LEAST_RANKS)}")
    words = [word for setting in settings for word in ("--set", setting)]
    status = run_on_ranks(
        ["network-test", "--config", "cpu_tiny", *words], max(ranks, _LEAST_RANKS)
    )
    if status != 0:
        remedy = "see the error above; without one, look at the package torch"
        return [fail("all-reduce", f"the ranks ended with status {status}", remedy)]
    return []


CHECKS: dict[str, Callable[[RunConfig | None], list[Finding]]] = {
    "machine": check_machine,
    "disk": check_disk,
    "packages": check_packages,
    "all-reduce": check_all_reduce,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    describe(
        parser,
        "Check processors, GPUs, memory, disk, packages, and an all-reduce between ranks. Print "
        "one line per finding, with a remedy if something is wrong. The exit status is 1 if "
        "training cannot run.",
        "mlperf_bert doctor --config cpu_tiny",
    )
    text = "check what this config needs (default: what every run needs)"
    add_config(parser, text, required=False)


def run(args: argparse.Namespace) -> int:
    """Print the findings as they come; 0, or 1 if something fails.

    Raises ConfigError for a wrong option.
    """
    if args.set and args.config is None:
        raise ConfigError("--set", "is given without --config", "give a config")
    config = load_config(args.config, args.set) if args.config else None
    has_failed = False
    for name in CHECKS:
        for finding in _examined(name, config):
            has_failed = has_failed or finding.status == "fail"
            print(finding.line(), flush=True)
    return EXIT_REFUSED if has_failed else 0


def _examined(name: str, config: RunConfig | None) -> list[Finding]:
    """Make a check; an error is a finding too, and does not stop the others."""
    try:
        return CHECKS[name](config)
    except UserError as error:
        where, problem, remedy = error.args
        return [fail(name, f"{where}: {problem}", remedy)]
    except Exception as error:
        return [fail(name, f"{type(error).__name__}: {error}", "fix that, and try again")]
