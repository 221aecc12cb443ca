"""The check `packages`: installed packages, and the cost of missing ones."""

import importlib.metadata
import importlib.util
import re
from contextlib import suppress
from dataclasses import dataclass

from bert_tools.common.machine import read_machine
from bert_tools.doctor.findings import Finding, fail, ok, warn
from mlperf_bert.config.run_config import RunConfig

_INSTALL = "run in the checkout: tools/venv.sh"


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


def check(config: RunConfig | None) -> list[Finding]:
    """Check the packages that are needed everywhere, and those that this config or a GPU needs."""
    needed = needed_here(config, has_gpus=read_machine().num_gpus > 0)
    packages = [*NEEDED, *(package for package in OPTIONAL if package.name in needed)]
    return [judge(package, installed_version(package)) for package in packages]


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
    for name in _distributions(package):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _distributions(package: Package) -> list[str]:
    names = [package.name, package.module]
    if package.module == "nvidia.dali":  # its name ends in the version of CUDA
        names = importlib.metadata.packages_distributions().get("nvidia", [])
        names = [name for name in names if "dali" in name]
    return names
