"""Exports the parts of a submission: code, system descriptions and logs, nothing else."""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from bert_tools.package.own_checks import Problems
from mlperf_bert.errors import DataError

# With the directories, all files needed to install this and to run it again.
CODE_FILES = (
    "Dockerfile",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "run_and_time.sh",
    "tools/build_image.sh",
    "tools/lock.py",
    "tools/venv.sh",
)
CODE_DIRECTORIES = ("benchmarks/bert", "docs", "requirements")
MAX_FILE_BYTES = 50 * 2**20  # the repository checker's limit
_BUILT = {"__pycache__", "build", "dist", "runs"}  # directories that .gitignore names
_OLD_PLACE = PurePosixPath("pytorch/configs")  # a link to the configs
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_LOG = re.compile(r"result_.*\.txt")


def export(root: Path, results: Path, tree: Path) -> tuple[list[str], Problems]:
    """Copy a repository's submission into the new directory `tree`.

    Args:
        root: the repository, with systems/ and benchmarks/.
        results: directory with <system>/bert/result_<i>.txt.
        tree: made here, without any wrong files.

    Returns:
        The names of the systems that have results, and all problems.

    Raises DataError if a directory is missing or something cannot be read or written.
    """
    for directory in (results, root / "systems", *(root / name for name in CODE_DIRECTORIES)):
        if not directory.is_dir():
            remedy = "name the repository by --root, and by --results where its results are"
            raise DataError(str(directory), "is no directory", remedy)
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
        reason = error.strerror or "cannot be copied"
        where = error.filename2 or error.filename  # for a failed copy, the second is written
        raise DataError(str(where), reason, "make it readable, check free space") from None
    return systems, problems


def _export_code_file(root: Path, name: str, tree: Path, problems: Problems) -> None:
    path = root / name
    if not os.path.lexists(path):
        problems.append(DataError(name, "is missing", "a submission must be reproducible: add it"))
        return
    problem = _problem(path)
    if problem is None and path.is_file():
        _copy(path, tree / name)
    else:
        problems.append(DataError(name, problem or "is no file", "put the file there"))


def _export_results(results: Path, tree: Path, problems: Problems) -> list[str]:
    for path, shown in _walk(results, "results", problems):
        parts = PurePosixPath(shown).parts
        if len(parts) == 4 and parts[2] == "bert" and _LOG.fullmatch(parts[3]):
            _copy(path, tree / shown)
        elif len(parts) > 3 or parts[-1] != "README.md":
            remedy = "move it away; only <system>/bert/result_<i>.txt and README.md belong there"
            problems.append(DataError(shown, "is no result", remedy))
    systems = [path.name for path in sorted(results.iterdir()) if path.is_dir() and _is_plain(path)]
    for system in systems:
        (tree / "results" / system / "bert").mkdir(parents=True, exist_ok=True)
    if not systems:
        remedy = "put the logs of ten runs into results/<system>/bert"
        problems.append(DataError("results", "holds no system", remedy))
    return systems


def _export_descriptions(source: Path, systems: list[str], tree: Path, problems: Problems) -> None:
    found = {shown: path for path, shown in _walk(source, "systems", problems)}
    for system in systems:
        name = f"systems/{system}.json"
        if name in found:
            _copy(found[name], tree / name)
        else:
            remedy = "add it: copy one that is in systems/, and change what differs"
            problems.append(DataError(name, "is missing", remedy))


def _walk(
    directory: Path,
    shown: str,
    problems: Problems,
    is_ignored: Callable[[Path], bool] = lambda _: False,
) -> Iterator[tuple[Path, str]]:
    """Files below a directory with their new names; forbidden ones become problems."""
    for path in sorted(directory.iterdir()):
        name = f"{shown}/{path.name}"
        if is_ignored(path):
            continue
        problem = _problem(path)
        if problem is not None:
            # A name may hold anything: line ends, bytes that are no text.
            remedy = "remove it, or put a plain file there"
            problems.append(DataError(ascii(name)[1:-1], problem, remedy))
        elif path.is_dir():
            yield from _walk(path, name, problems, is_ignored)
        else:
            yield path, name


def _is_ignored(path: Path) -> bool:
    """True if git ignores it, or it is only for git and other tools."""
    if path.is_symlink() and path.name == _OLD_PLACE.name:
        return path.parent.name == _OLD_PLACE.parent.name
    is_built = path.name in _BUILT or path.name.endswith(".egg-info")
    return path.name.startswith(".") or (is_built and path.is_dir())


def _problem(path: Path) -> str | None:
    """The fault that the checkers or MLCommons' repository would find in a file or directory."""
    status = path.lstat()
    if path.name.startswith("."):
        return "has a name that begins with a dot"
    if not _PLAIN_NAME.fullmatch(path.name):
        return "has a name with other characters than letters, digits and _.+-"
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "is neither a file nor a directory"
    if stat.S_ISREG(status.st_mode) and status.st_size > MAX_FILE_BYTES:
        return f"has {status.st_size:,} bytes, over the limit of {MAX_FILE_BYTES:,}"
    return None


def _is_plain(path: Path) -> bool:
    return _problem(path) is None


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)  # with its mode: scripts stay executable
