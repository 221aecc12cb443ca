"""The command `doctor`, which checks the machine, its disk, the packages, and an all-reduce."""

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
from mlperf_bert.errors import ConfigError, UserError
from mlperf_bert.extras import shadowed_packages
from mlperf_bert.machine import bf16_instructions, memory_bytes, usable_cpus

Status = Literal["ok", "warn", "fail"]
Gpu = tuple[str, int]
"""Name and memory in bytes of a GPU, as torch reports them."""
_NAME_WIDTH = 23
_GIB = 2**30
LEAST_FREE_BYTES, WANTED_FREE_BYTES = _GIB, 10 * _GIB  # a checkpoint of BERT-large has 4 GiB
_INSTALL = "run tools/venv.sh in the checkout"
_INSTALL_MPI = "install the extra 'mpi' and an MPI library"
_LEAST_RANKS = 2  # for the all-reduce
EXIT_REFUSED = 1  # exit status for schedulers, if a check fails


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check.

    `name` is the name of the check, or `<check>.<part>` if the check has several parts. `remedy` is
    empty if the status is `ok`.
    """

    status: Status
    name: str
    found: str
    remedy: str = ""

    def line(self) -> str:
        """Format the finding as one line of text."""
        text = f"{self.status:<4}  {self.name:<{_NAME_WIDTH}}  {' '.join(self.found.split())}"
        return text + (f"; {self.remedy}" if self.remedy else "")


def ok(name: str, found: str) -> Finding:
    """Return a finding that reports no problem."""
    return Finding("ok", name, found)


def warn(name: str, found: str, remedy: str) -> Finding:
    """Return a finding about a problem that slows training down or disables a feature."""
    return Finding("warn", name, found, remedy)


def fail(name: str, found: str, remedy: str) -> Finding:
    """Return a finding about a problem that prevents training or makes its results wrong."""
    return Finding("fail", name, found, remedy)


def cpu_model() -> str:
    """Return the name of this machine's processor. This also works on systems without /proc."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name[ \t]*:[ \t]*(.*)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine() or "unknown"


def gpus_of_driver() -> int:
    """Return the number of GPUs that NVIDIA's driver lists, or 0 without a driver."""
    with suppress(OSError):
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    return 0


def check_machine(config: RunConfig | None) -> list[Finding]:
    """Check this machine's processors and GPUs, and return the findings.

    Raises ImportError if torch is not installed.
    """
    findings = [judge_processors(len(usable_cpus()), _ranks(config))]
    import torch

    built_for = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    gpus = [(each.name, each.total_memory) for each in properties]
    return findings + judge_gpus(gpus, gpus_of_driver(), built_for, config)


def judge_processors(num_usable: int, ranks: int) -> Finding:
    """Return a finding about the processors, which must suffice for `ranks` ranks.

    `num_usable` is the number of hardware threads that this process may use.
    """
    name = "machine.cpu"
    bf16 = ", ".join(bf16_instructions()) or "none"
    found = (
        f"{cpu_model()}, {memory_bytes() / _GIB:.0f} GiB, {num_usable} usable threads, "
        f"instructions for bf16: {bf16}"
    )
    if num_usable < ranks:
        remedy = "request more CPUs per task (srun --cpus-per-task, docker --cpus) or fewer ranks"
        return warn(name, f"{found} for {ranks} ranks", remedy)
    return ok(name, found)


def judge_gpus(
    gpus: Sequence[Gpu], num_of_driver: int, built_for: str, config: RunConfig | None
) -> list[Finding]:
    """Return findings about the GPUs that torch can use.

    `num_of_driver` is the number of GPUs that the driver lists, and `built_for` names the torch
    build.
    """
    name, wanted = "machine.gpus", None if config is None else config.run.device
    if not gpus and num_of_driver:
        found = f"the driver lists {num_of_driver} GPUs, but {built_for} can use none"
        remedy = "install a torch build for this driver's CUDA, and check CUDA_VISIBLE_DEVICES"
        return [fail(name, found, remedy)]
    if not gpus and wanted == "cuda":
        remedy = "use a machine with GPUs (docker needs --gpus all), or add --set run.device=cpu"
        return [fail(name, f"none ({built_for}), but the config needs 'cuda'", remedy)]
    if not gpus:
        return [ok(name, f"none ({built_for}), so training runs on the CPU")]
    kinds = Counter(f"{gpu[0]} {gpu[1] / _GIB:.0f} GiB" for gpu in gpus)
    found = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) + f", {built_for}"
    findings = [ok(name, found)]
    if len(kinds) > 1:
        remedy = "use GPUs of one kind, because all ranks wait for the slowest one"
        findings = [warn(name, found, remedy)]
    shares = config is None or wanted == "cpu" or config.parallel.share_gpu == "allow"
    if not shares and _ranks(config) > len(gpus):
        found = f"{len(gpus)} GPUs, but the config has {_ranks(config)} ranks per node"
        remedy = f"add --set parallel.ranks_per_node={len(gpus)}, or choose another config"
        findings.append(fail(name, found, remedy))
    return findings


def _ranks(config: RunConfig | None) -> int:
    """Return the number of ranks per node that the config needs, or 1 without a config."""
    return 1 if config is None else config.parallel.ranks_per_node


def check_disk(config: RunConfig | None) -> list[Finding]:
    """Check the free space in the current directory, which contains runs by default."""
    here = Path.cwd()
    return [judge_free(here, shutil.disk_usage(here).free)]


def judge_free(where: Path, free_bytes: int) -> Finding:
    """Return a finding about whether the free space suffices for logs and checkpoints."""
    name, found = "disk", f"{free_bytes / _GIB:,.1f} GiB free in {where}"
    remedy = "free some space, or pass a --run-dir on another file system"
    if free_bytes < LEAST_FREE_BYTES:
        return fail(name, f"only {found}", remedy)
    if free_bytes < WANTED_FREE_BYTES:
        return warn(name, f"{found}, but each checkpoint of BERT-large needs 4 GiB", remedy)
    return ok(name, found)


@dataclass(frozen=True, slots=True)
class Package:
    """A package that this program imports.

    Args:
        name: name on PyPI.
        module: module that is imported.
        use: what the package is needed for.
        install: how to install an optional package, empty if the package is required.
    """

    name: str
    module: str
    use: str
    install: str = ""


NEEDED = (
    Package("torch", "torch", "training"),
    Package("numpy", "numpy", "training"),
    Package("numba", "numba", "training"),
    Package("h5py", "h5py", "preparing data"),
    Package("safetensors", "safetensors", "saving weights"),
    Package("mlperf-logging", "mlperf_logging", "writing logs"),
    Package("scipy", "scipy", "fitting curves"),
    Package("google-crc32c", "google_crc32c", "reading TensorFlow files"),
    Package("jinja2", "jinja2", "writing report pages"),
    Package("rich", "rich", "printing tables"),
)
OPTIONAL = (
    # apex is recognized by a compiled module, because the package named apex on PyPI is unrelated.
    Package(
        "apex",
        "amp_C",
        "optim.implementation 'apex'",
        install="use a container image with NVIDIA's apex",
    ),
    Package("nvidia-dali", "nvidia.dali", "data.loader 'dali'", install="install the extra 'dali'"),
    Package("triton", "triton", "fused kernels on a GPU", install="install triton"),
    Package("mpi4py", "mpi4py", "data.loader 'mpi_readers'", install=_INSTALL_MPI),
)


def check_packages(config: RunConfig | None) -> list[Finding]:
    """Check the required packages, and the optional packages that the config or a GPU needs."""
    needed = needed_here(config, has_gpus=gpus_of_driver() > 0)
    packages = [*NEEDED, *(package for package in OPTIONAL if package.name in needed)]
    elsewhere = {name: directory for directory, name in shadowed_packages()}
    findings = []
    for package in packages:
        if package.module in elsewhere:  # the environment's version is not the one imported
            found = f"PYTHONPATH makes Python import it from {elsewhere[package.module]}"
            findings.append(fail(f"packages.{package.name}", found, "unset PYTHONPATH"))
        else:
            findings.append(judge(package, installed_version(package)))
    return findings


def needed_here(config: RunConfig | None, *, has_gpus: bool) -> set[str]:
    """Return the names of the optional packages that the config or this machine's GPUs need."""
    needed = {"triton"} if has_gpus else set()
    if config is not None:
        choices = {"apex": "apex", "dali": "nvidia-dali", "mpi_readers": "mpi4py"}
        chosen = {config.optim.implementation, config.data.loader}
        needed |= {choices[each] for each in chosen & choices.keys()}
    return needed


def judge(package: Package, version: str | None) -> Finding:
    """Return a finding about a package.

    `version` is None if the package is not installed, and "" if its version is unknown.
    """
    name = f"packages.{package.name}"
    if version is None and package.install:
        return warn(name, f"not installed, but needed for {package.use}", package.install)
    if version is None:
        return fail(name, f"not installed, but needed for {package.use}", _INSTALL)
    return ok(name, version or "installed")


def installed_version(package: Package) -> str | None:
    """Return the installed version of a package.

    Returns "" if the version is unknown, or None if the package's module is not found.
    """
    try:
        spec = importlib.util.find_spec(package.module)
    except (ImportError, ValueError):  # the parent package of a sub-module is missing
        spec = None
    if spec is None:
        return None
    for name in (package.name, package.module):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def check_all_reduce(config: RunConfig | None) -> list[Finding]:
    """Start ranks that test an all-reduce on this machine and print the result.

    The config sets the number of ranks. Without a config, there is one rank per GPU, but at least
    two ranks. Returns one finding if the test fails, and otherwise none. Raises ConfigError if the
    machine cannot run so many ranks.
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
        remedy = "fix the error that is printed above, or check that torch works"
        return [fail("all-reduce", f"the ranks exited with status {status}", remedy)]
    return []


CHECKS: dict[str, Callable[[RunConfig | None], list[Finding]]] = {
    "machine": check_machine,
    "disk": check_disk,
    "packages": check_packages,
    "all-reduce": check_all_reduce,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `doctor` to its parser."""
    describe(
        parser,
        "Check processors, GPUs, memory, disk, packages, and an all-reduce between ranks. Print "
        "one line per finding, with a remedy if something is wrong. The exit status is 1 if "
        "training cannot run.",
        "mlperf_bert doctor --config cpu_tiny",
    )
    text = "check the requirements of this config (default: those of every run)"
    add_config(parser, text, required=False)


def run(args: argparse.Namespace) -> int:
    """Run all checks, and print each finding as soon as it is known.

    Returns 0, or 1 if a check fails. Raises ConfigError for a wrong option.
    """
    if args.set and args.config is None:
        raise ConfigError("--set", "needs --config", "add --config FILE")
    config = load_config(args.config, args.set) if args.config else None
    has_failed = False
    for name in CHECKS:
        for finding in _examined(name, config):
            has_failed = has_failed or finding.status == "fail"
            print(finding.line(), flush=True)
    return EXIT_REFUSED if has_failed else 0


def _examined(name: str, config: RunConfig | None) -> list[Finding]:
    """Run one check and return its findings.

    An error of the check becomes a finding, so that the other checks still run.
    """
    try:
        return CHECKS[name](config)
    except UserError as error:
        where, problem, remedy = error.args
        return [fail(name, f"{where}: {problem}", remedy)]
    except Exception as error:
        return [fail(name, f"{type(error).__name__}: {error}", "fix this error and try again")]
