"""Select the locked requirements of an installation, or write the lock from uv's output.

    python3 tools/lock.py select OUT [--extra NAME]... [--lacking] [--torch BUILD]
    python3 tools/lock.py split FILE      writes requirements/ (`make lock`)

`hashed.txt` has each package's version and the digests of its files, for every Python and system.
`pinned.txt` has only the versions of torch, Triton and CUDA's libraries, because package indexes
offer their own builds of them. `select` writes both files into OUT, with the requirements of
pyproject.toml and of the given extras. From `pinned.txt` it selects only packages that are
required directly, because a CPU build of torch needs none of the other packages. `--torch cpu`
selects the CPU build of torch. This script runs before anything is installed, so it imports only
the standard library.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Collection, Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HASHED, PINNED = "hashed.txt", "pinned.txt"
OTHER_BUILDS = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
_NAME = re.compile(r"[\w.-]+")


def canonical(requirement: str) -> str:
    """Return the package name at the start of a requirement.

    The name is normalized as on a package index.
    """
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def read(text: str) -> dict[str, list[str]]:
    """Return the lines of a requirements file, grouped by package name.

    The lines of a package are its requirement, its digests, and comments with the names of the
    packages that need it.
    """
    blocks: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line[:1].isalnum():
            # A package may appear twice, with different versions for two versions of Python.
            lines = blocks.setdefault(canonical(line), [])
        if line[:1].isalnum() or line.startswith(" "):
            lines.append(line)
    return blocks


def roots(project: dict[str, Any], requirements: Iterable[str]) -> list[str]:
    """Return the names of the packages that are required directly.

    A requirement of this project's own extras is replaced by the requirements of these extras.
    """
    found = []
    for requirement in requirements:
        if canonical(requirement) != canonical(project["name"]):
            found.append(canonical(requirement))
            continue
        for extra in requirement[requirement.index("[") + 1 : requirement.index("]")].split(","):
            found += roots(project, project["optional-dependencies"][extra.strip()])
    return found


def select(
    lock: Path, pyproject: Path, extras: Collection[str], present: set[str]
) -> dict[str, str]:
    """Return the contents of `hashed.txt` and `pinned.txt` for one installation.

    Args:
        lock: the directory with both files of the lock.
        pyproject: the file with the requirements.
        extras: names of the project's extras to include.
        present: names of installed packages. These packages, and those that only they need, are
            not selected. Packages that build the project are selected in any case.

    Raises:
        ValueError: the lock lacks a package, or pyproject.toml lacks an extra.
    """
    tables = tomllib.loads(pyproject.read_text("utf-8"))
    project = tables["project"]
    groups = project.get("optional-dependencies", {})
    for extra in extras:
        if extra not in groups:
            raise ValueError(f"{pyproject.name} has no extra '{extra}'; use {', '.join(groups)}")
    files = {name: read((lock / name).read_text("utf-8")) for name in (HASHED, PINNED)}
    blocks = files[HASHED] | files[PINNED]
    needed_by = {name: _dependents(lines) for name, lines in blocks.items()}
    of_extras = [each for extra in extras for each in groups[extra]]
    named = roots(project, [*project["dependencies"], *of_extras])
    building = {canonical(each) for each in tables["build-system"]["requires"]}
    wanted = _with_all_needed(building | set(named) - present, needed_by, present)
    for name in wanted:
        if name not in blocks:
            raise ValueError(
                f"{pyproject.name} requires {name}, which the lock does not contain; run make lock"
            )
    return {
        HASHED: _text(files[HASHED], set(wanted)),
        PINNED: _text(files[PINNED], set(named) - present),
    }


def split(text: str) -> dict[str, str]:
    """Return the contents of both files of the lock, from the single file that uv wrote."""
    blocks = read(text)
    pinned = {name for name, lines in blocks.items() if OTHER_BUILDS.match(lines[0])}
    without = {
        name: [line.removesuffix(" \\") for line in blocks[name] if "--hash=" not in line]
        for name in pinned
    }
    return {HASHED: _text(blocks, blocks.keys() - pinned), PINNED: _text(without, pinned)}


def main() -> None:
    """Run the command, or report a user's mistake in one line and exit with status 2."""
    parser = argparse.ArgumentParser(description="Select lines of the lock, or rewrite the lock.")
    commands = parser.add_subparsers(dest="command", required=True)
    selecting = commands.add_parser("select", help="write the requirements of an installation")
    selecting.add_argument("out", type=Path, help="directory for hashed.txt and pinned.txt")
    text = "extra of pyproject.toml to include, can be repeated"
    selecting.add_argument("--extra", action="append", default=[], metavar="NAME", help=text)
    text = "select only packages that are not installed in this Python"
    selecting.add_argument("--lacking", action="store_true", help=text)
    text = "build of torch to install, such as cpu, which is added to the version of torch"
    selecting.add_argument("--torch", metavar="BUILD", help=text)
    splitting = commands.add_parser("split", help="write requirements/ from the output of uv")
    splitting.add_argument("file", type=Path, help="file with the output of uv pip compile")
    arguments = parser.parse_args()
    if arguments.command == "split":
        _write(ROOT / "requirements", split(arguments.file.read_text("utf-8")))
        return
    present = {canonical(each.name) for each in distributions()} if arguments.lacking else set()
    if present:
        print("kept:", ", ".join(sorted(present)))
    try:
        texts = select(ROOT / "requirements", ROOT / "pyproject.toml", arguments.extra, present)
    except ValueError as error:
        print(f"tools/lock.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    if arguments.torch:
        texts[PINNED] = re.sub(r"(?m)^(torch==[\d.]+)", rf"\1+{arguments.torch}", texts[PINNED])
    _write(arguments.out, texts)


def _with_all_needed(
    names: set[str], needed_by: dict[str, set[str]], present: set[str]
) -> list[str]:
    """Return `names` and all packages that they need, directly or indirectly.

    Packages in `present` are not added. `needed_by` maps a package to those that need it.
    """
    wanted = list(names)
    for name in wanted:
        wanted += [
            other
            for other, dependents in needed_by.items()
            if name in dependents and other not in present and other not in wanted
        ]
    return wanted


def _dependents(lines: list[str]) -> set[str]:
    """Return the names of the packages that need a package.

    uv writes these names in comments, which are among the `lines` of the needed package.
    """
    comments = (re.fullmatch(r"\s+#\s+(?:via\s*)?(\S*).*", line) for line in lines)
    return {canonical(each[1]) for each in comments if each is not None and each[1]}


def _text(blocks: dict[str, list[str]], names: Iterable[str]) -> str:
    return "".join("\n".join(blocks[name]) + "\n" for name in sorted(names & blocks.keys()))


def _write(directory: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (directory / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
