"""Check that the optional packages of a command are installed, and say how to install them.

An extra is a group of optional packages in pyproject.toml. Before a command does any work, it calls
`require_packages` with all optional packages that it will import. The user therefore learns of a
missing package at once, not after minutes of computing.
"""

import importlib.util
import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlperf_bert.errors import ConfigError

# Approximate size of each extra's download in MB, the same as in pyproject.toml.
MEGABYTES = {
    "dali": 205,
    "mpi": 2,
    "parquet": 55,
    "plots": 25,
    "score": 62,
    "squad": 34,
    "tensorboard": 28,
    "tokenizers": 9,
    "transformers": 37,
    "tune": 30,
}
# Packages that are named differently from their modules.
_INSTALLED_AS = {
    "nvidia.dali": "nvidia-dali-cuda130",
    "huggingface_hub": "huggingface-hub",
    "sklearn": "scikit-learn",
}
_SCRIPT = Path("tools/venv.sh")
_HERE = Path("benchmarks/bert/implementations/pytorch/mlperf_bert")  # in a checkout
# Packages that the program needs, of which `module load` may bring other versions.
_PACKAGES = ("torch", "numpy", "numba", "h5py", "safetensors", "mlperf_logging", "scipy", "rich")


def require_packages(
    where: str,
    extra: str,
    *modules: str,
    purpose: str = "",
    otherwise: str = "",
) -> None:
    """Check that optional packages are installed.

    Args:
        where: the command, option or file that needs the packages, with which the error message
            starts.
        extra: the extra that contains the packages, a key of MEGABYTES.
        modules: the names by which the packages are imported.
        purpose: what the packages are needed for, such as "to read .parquet files".
        otherwise: another remedy for the message, such as "use a vocab.txt".

    Raises:
        ConfigError: a package is missing. The message names the command that installs it.
    """
    missing = _missing(modules)
    if not missing:
        return
    command = install_command(extra, missing)
    problem = " ".join(filter(None, ("needs", " and ".join(missing), purpose)))
    problem += f", but {'it is' if len(missing) == 1 else 'they are'} not installed"
    remedy = f"run {_typed(command)} (downloads about {MEGABYTES[extra]} MB)"
    remedy += f", or {otherwise}" if otherwise else ""
    raise ConfigError(where, problem, remedy)


def install_command(extra: str, packages: Sequence[str]) -> list[str]:
    """Return the words of a command that installs an extra into this environment.

    In the .venv of a checkout, the command is tools/venv.sh, which installs locked versions.
    Otherwise, the command runs pip on the checkout that contains this module. Without a checkout,
    pip installs `packages` by name.
    """
    environment = Path(sys.prefix).resolve()
    script = environment.parent / _SCRIPT
    if environment.name == ".venv" and script.is_file():
        return [str(script), extra]
    pip = [sys.executable, "-P", "-m", "pip", "install"]
    here, depth = Path(__file__).parent, len(_HERE.parts)
    if here.parts[-depth:] == _HERE.parts:
        return [*pip, "--editable", f"{here.parents[depth - 1]}[{extra}]"]
    return [*pip, *packages]


def _missing(modules: Sequence[str]) -> list[str]:
    """Return the names of the packages whose modules are not installed."""
    return [_INSTALLED_AS.get(module, module) for module in modules if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around the module is missing
        return False
    except ValueError:  # a module in memory without a specification
        return True


def _typed(command: Sequence[str]) -> str:
    """Quote a command for the shell. A script in the current directory gets a relative path."""
    script = Path(command[0])
    if script == Path.cwd() / _SCRIPT:
        command = [str(_SCRIPT), *command[1:]]
    return shlex.join(command)


def shadowed_packages(
    environ: Mapping[str, str] = os.environ,  # noqa: TID251, where Python itself reads it
) -> list[tuple[str, str]]:
    """Return the (directory, name) of each package of the environment that PYTHONPATH hides.

    The environment modules of a cluster (`module load`) often set PYTHONPATH. Python then imports
    packages from there instead of from the environment.
    """
    own = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    needed = [name for name in _PACKAGES if any(_has_package(each, name) for each in own)]
    return [
        (directory, name)
        for directory in environ.get("PYTHONPATH", "").split(os.pathsep)
        for name in needed
        if directory and os.path.realpath(directory) not in own and _has_package(directory, name)
    ]


def _has_package(directory: str, name: str) -> bool:
    files = (f"{name}.py", f"{name}/__init__.py")
    return any(os.path.exists(os.path.join(directory, file)) for file in files)
