"""The check `packages`: what is installed, and what the lack of the rest costs."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mlperf_bert.distributed.network_test.findings import Finding, Options, fail, ok, warn

RULESET = "5.0.0"  # of MLPerf training, the last that knows BERT
_INSTALL = "run in the checkout: tools/venv.sh"
_MPI_SECONDS = 20
_ASK_MPI = (
    "import mpi4py; mpi4py.rc.initialize = False; mpi4py.rc.finalize = False; "
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """`cost`: what is lost without it; `source`: what to install for it, where not its name."""

    name: str
    module: str
    cost: str
    source: str = ""
    lowest: tuple[int, ...] = ()
    below: tuple[int, ...] = ()


NEEDED = (
    Package(name="torch", module="torch", cost="trains nothing", lowest=(2, 11), below=(2, 14)),
    Package(name="numpy", module="numpy", cost="trains nothing", lowest=(2, 0)),
    Package(name="numba", module="numba", cost="trains nothing", lowest=(0, 61)),
    Package(name="h5py", module="h5py", cost="prepares no data", lowest=(3, 12)),
    Package(name="safetensors", module="safetensors", cost="saves no weights", lowest=(0, 5)),
    Package(name="mlperf-logging", module="mlperf_logging", cost="writes no log", lowest=(4, 1)),
    Package(name="rich", module="rich", cost="shows no progress", lowest=(13,)),
    Package(name="matplotlib", module="matplotlib", cost="draws no picture", lowest=(3, 9)),
)
OPTIONAL = (
    Package(
        name="apex",
        module="amp_C",  # compiled; the project called apex on PyPI is something else
        cost="no optim.implementation 'apex'",
        source="an image that has NVIDIA's apex",
    ),
    Package(
        name="nvidia-dali",
        module="nvidia.dali",
        cost="no data.loader 'dali'",
        source="extra 'dali'",
    ),
    Package(name="triton", module="triton", cost="no fused kernels on a GPU"),
    Package(name="transformers", module="transformers", cost="no `bench against`"),
    Package(
        name="pynvml",
        module="pynvml",
        cost="no GPU temperatures and clocks here",
        source="nvidia-ml-py",
    ),
)


def check(options: Options) -> list[Finding]:
    """Look for all of them; nothing is imported but an MPI, in a process of its own."""
    findings = [judge_needed(package, installed_version(package)) for package in NEEDED]
    findings.append(judge_ruleset(installed_rulesets()))
    findings += [judge_optional(package, installed_version(package)) for package in OPTIONAL]
    return [*findings, judge_mpi(*_mpi_library())]


def judge_needed(package: Package, version: str | None) -> Finding:
    """`version`: None where it is not installed, empty where that is all that is known."""
    name = f"packages.{package.name}"
    if version is None:
        return fail(name, f"missing: {package.cost}", _INSTALL)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
    if numbers and (numbers < package.lowest or (package.below and numbers >= package.below)):
        remedy = f"not tried with this one, but with {requirement(package)}; {_INSTALL}"
        return warn(name, version, remedy)
    return ok(name, version or "installed")


def judge_optional(package: Package, version: str | None) -> Finding:
    """As `judge_needed`, for what training can do without."""
    name = f"packages.{package.name}"
    if version is None:
        return warn(
            name, f"not found: {package.cost}", f"if you need it: {package.source or package.name}"
        )
    return ok(name, version or "installed")


def judge_ruleset(rulesets: tuple[str, ...] | None) -> Finding:
    """`rulesets` of the installed mlperf-logging, None where there is none."""
    name = "packages.ruleset"
    if rulesets is None:
        return warn(name, "no mlperf-logging: logs cannot be checked", _INSTALL)
    if RULESET not in rulesets:
        found = f"this mlperf-logging does not know {RULESET}"
        return fail(name, found, _INSTALL)
    return ok(name, f"mlperf-logging knows {RULESET}")


def judge_mpi(library: str | None, reason: str) -> Finding:
    """`library`: what MPI says of itself; `reason` why it says nothing."""
    name = "packages.mpi"
    if library is None:
        remedy = "if you need it: extra 'mpi' and an MPI"
        return warn(name, f"{reason}: no data.loader 'mpi_readers'", remedy)
    return ok(name, library)


def requirement(package: Package) -> str:
    """For pip."""
    text = package.name
    if package.lowest:
        text += ">=" + ".".join(str(number) for number in package.lowest)
    if package.below:
        text += ",<" + ".".join(str(number) for number in package.below)
    return text


def installed_version(package: Package) -> str | None:
    """Its version, empty where it has none, None where the module is not to be found."""
    try:
        if importlib.util.find_spec(package.module) is None:
            return None
    except (ImportError, ValueError):  # a part of a package that is not there
        return None
    for name in _distributions(package):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _distributions(package: Package) -> list[str]:
    names = [package.name, package.module]
    if package.module == "nvidia.dali":  # its name ends in the version of CUDA
        names = importlib.metadata.packages_distributions().get("nvidia", [])
        names = [name for name in names if "dali" in name]
    if package.module == "pynvml":
        names.append("nvidia-ml-py")
    return names


def installed_rulesets() -> tuple[str, ...] | None:
    """Versions of MLPerf training's rules that the installed checkers know."""
    try:
        spec = importlib.util.find_spec("mlperf_logging")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "compliance_checker"
    found = folder.glob("training_*.*")
    return tuple(sorted(path.name.removeprefix("training_") for path in found if path.is_dir()))


def _mpi_library() -> tuple[str | None, str]:
    # In a process of its own: loading an MPI library that does not fit may end it.
    if importlib.util.find_spec("mpi4py") is None:
        return None, "mpi4py not found"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_MPI],
            capture_output=True,
            text=True,
            timeout=_MPI_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None, "mpi4py does not answer"
    if done.returncode != 0:
        return None, "mpi4py finds no MPI library"
    version = importlib.metadata.version("mpi4py")
    return f"mpi4py {version} with {done.stdout.strip().splitlines()[0].strip()}", ""
