"""Check that the optional packages of a command are installed, and offer to install them.

An extra is a group of optional packages in pyproject.toml. Before a command does any work, it calls
`require_packages` with all optional packages that it will import. The user therefore learns of a
missing package at once, not after minutes of computing.
"""

import importlib
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlperf_bert.errors import ConfigError, say_error

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
    may_ask: bool = True,
) -> None:
    """Check that optional packages are installed, and offer on a terminal to install their extra.

    Args:
        where: the command, option or file that needs the packages, with which the error message
            starts.
        extra: the extra that contains the packages, a key of MEGABYTES.
        modules: the names by which the packages are imported.
        purpose: what the packages are needed for, such as "to read .parquet files".
        otherwise: another remedy for the message, such as "use a vocab.txt".
        may_ask: whether to offer the installation if stdin and stderr are a terminal. Ranks that a
            launcher started must not ask, because they share a terminal.

    Raises:
        ConfigError: a package is missing and was not installed now.
    """
    missing = _missing(modules)
    if not missing:
        return
    command = install_command(extra, missing)
    problem = " ".join(filter(None, ("needs", " and ".join(missing), purpose)))
    problem += f", but {'it is' if len(missing) == 1 else 'they are'} not installed"
    remedy = f"run {_typed(command)} (downloads about {MEGABYTES[extra]} MB)"
    remedy += f", or {otherwise}" if otherwise else ""
    error = ConfigError(where, problem, remedy)
    if not may_ask or not _is_on_terminal():
        raise error
    say_error(error)
    if not _is_confirmed():
        error.is_said = True
        raise error
    _install(command)
    if left := _missing(modules):
        problem = f"{' and '.join(left)} could not be installed"
        raise ConfigError(where, problem, "fix the error that the installer printed above")


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


def _is_on_terminal() -> bool:
    """Return True if a person at a terminal can answer. A background job gets no answer."""
    if any(stream is None or not stream.isatty() for stream in (sys.stdin, sys.stderr)):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # stdin is no real terminal
        return False


def _is_confirmed() -> bool:
    """Ask the user whether to install now. Returns False if there is no answer.

    The question is printed to stderr, because stdout may be a file.
    """
    sys.stderr.write("Install now? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _install(command: Sequence[str]) -> None:
    """Run the installation, with its output on stderr, and make the new packages importable.

    Raises ConfigError if the command cannot be run.
    """
    try:
        subprocess.run(command, stdout=sys.stderr, check=False)
    except OSError as error:
        problem = error.strerror or "cannot be run"
        raise ConfigError(command[0], problem, "install the packages yourself") from None
    importlib.invalidate_caches()


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
