"""The copy of all files that a submission needs, which are code, descriptions and logs."""

import difflib
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from bert_tools.package.own_checks import LOG_NAMES, RUNS, Problems
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.files import names_in

# Together with CODE_DIRECTORIES, these are all the files needed to install and rerun this code.
CODE_FILES = (
    "Dockerfile",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "run_and_time.sh",
    "tools/lock.py",
    "tools/venv.sh",
)
CODE_DIRECTORIES = ("benchmarks/bert", "docs", "requirements")
MAX_FILE_BYTES = 50 * 2**20  # the repository checker's limit
_BUILT = {"__pycache__", "build", "dist", "runs"}  # directories listed in .gitignore
_CONFIGS_LINK = PurePosixPath("pytorch/configs")  # a symbolic link to the configs
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_LOG = re.compile(r"result_.*\.txt")


def is_run_directory(directory: Path) -> bool:
    """Return whether a directory contains result_<i>.txt, like the LOGDIR of run_and_time.sh."""
    return any(map(_LOG.fullmatch, names_in(directory)))


def results_of_runs(run_directory: Path, system: str | None, root: Path, results: Path) -> None:
    """Copy the logs of a run directory into the new directory `results`.

    The copy has the form that `export` reads: <system>/bert/result_<i>.txt. Links are copied as
    links, so that `export` reports them.

    Raises ConfigError if `system` is None or is not described in the repository `root`, and
    DataError if a log cannot be copied.
    """
    known = sorted(path.stem for path in (root / "systems").glob("*.json"))
    if system is None:
        problem = f"is missing, and the run directory {run_directory} does not record its system"
        remedy = f"pass the system that the runs used, which is one of {', '.join(known)}"
        raise ConfigError("--system", problem, remedy)
    if system not in known:
        near = difflib.get_close_matches(system, known)
        remedy = f"did you mean {' or '.join(near)}?" if near else "add it to systems/"
        raise ConfigError("--system", f"systems/{system}.json does not exist", remedy)
    target = results / system / "bert"
    target.mkdir(parents=True)
    for name in filter(_LOG.fullmatch, names_in(run_directory)):
        try:
            shutil.copy(run_directory / name, target / name, follow_symlinks=False)
        except OSError as error:
            raise _copy_error(error) from None


def export(root: Path, results: Path, tree: Path) -> tuple[list[str], Problems]:
    """Copy the files of a repository's submission into the new directory `tree`.

    Args:
        root: the repository, with systems/ and benchmarks/.
        results: a directory with <system>/bert/result_<i>.txt.
        tree: directory to create. Files with problems are not copied into it.

    Returns:
        The names of the systems that have results, and all problems.

    Raises DataError if a directory is missing or a file cannot be read or written.
    """
    for directory in (results, root / "systems", *(root / name for name in CODE_DIRECTORIES)):
        if not directory.is_dir():
            remedy = "pass the results, and use --root to pass the path of the repository"
            raise DataError(str(directory), "no such directory", remedy)
    problems: Problems = []
    try:
        tree.mkdir()
        for name in CODE_FILES:
            _export_code_file(root, name, tree, problems)
        for name in CODE_DIRECTORIES:
            for path, shown in _walk(root / name, name, problems, _is_ignored):
                _copy(path, tree / shown)
        systems = _export_results(results, tree, problems)
        _export_descriptions(root / "systems", systems, tree, problems)
    except OSError as error:
        raise _copy_error(error) from None
    return systems, problems


def _copy_error(error: OSError) -> DataError:
    reason = error.strerror or "cannot be copied"
    where = error.filename2 or error.filename  # the second name is the target of a copy
    return DataError(str(where), reason, "check its permissions and the free disk space")


def _export_code_file(root: Path, name: str, tree: Path, problems: Problems) -> None:
    """Copy one file of CODE_FILES into the tree.

    If the file cannot be part of the submission, the reason is appended to `problems`.
    """
    path = root / name
    if not os.path.lexists(path):
        remedy = "restore this file, because a submission must be reproducible"
        problems.append(DataError(name, "is missing", remedy))
        return
    problem = _problem(path)
    if problem is None and path.is_file():
        _copy(path, tree / name)
    else:
        problems.append(DataError(name, problem or "is not a file", "replace it with a file"))


def _export_results(results: Path, tree: Path, problems: Problems) -> list[str]:
    """Copy the logs of all systems and return the names of the systems."""
    for path, shown in _walk(results, "results", problems):
        parts = PurePosixPath(shown).parts
        if len(parts) == 4 and parts[2] == "bert" and _LOG.fullmatch(parts[3]):
            _copy(path, tree / shown)
        elif len(parts) > 3 or parts[-1] != "README.md":
            remedy = "keep only README.md and <system>/bert/result_<i>.txt in this directory"
            problems.append(DataError(shown, "is not a result", remedy))
    systems = [path.name for path in sorted(results.iterdir()) if path.is_dir() and _is_plain(path)]
    for system in systems:
        (tree / "results" / system / "bert").mkdir(parents=True, exist_ok=True)
    if not systems:
        remedy = f"copy {LOG_NAMES[0]} to {LOG_NAMES[-1]} of {RUNS} runs into <system>/bert"
        problems.append(DataError("results", "contains no results of a system", remedy))
    return systems


def _export_descriptions(source: Path, systems: list[str], tree: Path, problems: Problems) -> None:
    """Copy the description of each system that has results."""
    found = {shown: path for path, shown in _walk(source, "systems", problems)}
    for system in systems:
        name = f"systems/{system}.json"
        if name in found:
            _copy(found[name], tree / name)
        else:
            remedy = "copy another description in systems/, and adapt it to this system"
            problems.append(DataError(name, "is missing", remedy))


def _walk(
    directory: Path,
    shown: str,
    problems: Problems,
    is_ignored: Callable[[Path], bool] = lambda _: False,
) -> Iterator[tuple[Path, str]]:
    """Yield each file below a directory with its new name, which begins with `shown`.

    For each forbidden file, a problem is appended to `problems` instead.
    """
    for path in sorted(directory.iterdir()):
        name = f"{shown}/{path.name}"
        if is_ignored(path):
            continue
        problem = _problem(path)
        if problem is not None:
            # A file name may contain anything, for example line ends or undecodable bytes.
            remedy = "remove it, or replace it with a regular file"
            problems.append(DataError(ascii(name)[1:-1], problem, remedy))
        elif path.is_dir():
            yield from _walk(path, name, problems, is_ignored)
        else:
            yield path, name


def _is_ignored(path: Path) -> bool:
    """Return whether git ignores a file, or whether the file is used only by git or other tools."""
    if path.is_symlink() and path.name == _CONFIGS_LINK.name:
        return path.parent.name == _CONFIGS_LINK.parent.name
    is_built = path.name in _BUILT or path.name.endswith(".egg-info")
    return path.name.startswith(".") or (is_built and path.is_dir())


def _problem(path: Path) -> str | None:
    """Return why the checkers or MLCommons' repository would reject a path, or None."""
    status = path.lstat()
    if path.name.startswith("."):
        return "has a name that begins with a dot"
    if not _PLAIN_NAME.fullmatch(path.name):
        return "has characters other than letters, digits and _.+- in its name"
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "is neither a file nor a directory"
    if stat.S_ISREG(status.st_mode) and status.st_size > MAX_FILE_BYTES:
        return f"has {status.st_size:,} bytes, more than the limit of {MAX_FILE_BYTES:,}"
    return None


def _is_plain(path: Path) -> bool:
    return _problem(path) is None


def _copy(source: Path, target: Path) -> None:
    """Copy a file with its permissions, so that scripts stay executable."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
