"""The lock: selects the lines of requirements/ for an installation, and splits what uv compiled.

    python3 tools/lock.py select OUT [--extra NAME] [--lacking] [--torch BUILD]
    python3 tools/lock.py split FILE      writes requirements/ (`make lock`)

`hashed.txt` has each package's version and the digests of its files, for every Python and system;
`pinned.txt` has torch, Triton and CUDA's libraries by version only, as indexes have builds of their
own. `select` writes files of both names into OUT with the needs of pyproject.toml and an extra.
From `pinned.txt` it takes only packages that these name, as a CPU's torch needs none of the rest;
`--torch cpu` asks for that build of torch by name. It runs before anything is installed.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HASHED, PINNED = "hashed.txt", "pinned.txt"
OTHER_BUILDS = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
_NAME = re.compile(r"[\w.-]+")


def canonical(requirement: str) -> str:
    """The name at the start of a requirement, as an index writes it."""
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def read(text: str) -> dict[str, list[str]]:
    """The lines of each package by name: requirement, digests, and the packages that need it."""
    blocks: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line[:1].isalnum():
            lines = blocks.setdefault(canonical(line), [])  # twice, for two versions of Python
        if line[:1].isalnum() or line.startswith(" "):
            lines.append(line)
    return blocks


def roots(project: dict[str, Any], requirements: Iterable[str]) -> list[str]:
    """Names of requirements; the project's own extras are replaced by their requirements."""
    found = []
    for requirement in requirements:
        if canonical(requirement) != canonical(project["name"]):
            found.append(canonical(requirement))
            continue
        for extra in requirement[requirement.index("[") + 1 : requirement.index("]")].split(","):
            found += roots(project, project["optional-dependencies"][extra.strip()])
    return found


def select(lock: Path, pyproject: Path, extra: str | None, present: set[str]) -> dict[str, str]:
    """The text of both files for one installation.

    Args:
        lock: directory of the lock.
        pyproject: the file with the requirements.
        extra: one of its optional groups.
        present: packages that stay as they are, with all their needs; build packages never do.

    Raises:
        ValueError: the lock lacks a package, or pyproject.toml the extra.
    """
    tables = tomllib.loads(pyproject.read_text("utf-8"))
    project = tables["project"]
    extras = {None: []} | project.get("optional-dependencies", {})
    if extra not in extras:
        raise ValueError(f"{pyproject.name} has no extra '{extra}'")
    files = {name: read((lock / name).read_text("utf-8")) for name in (HASHED, PINNED)}
    blocks = files[HASHED] | files[PINNED]
    askers = {name: _askers(lines) for name, lines in blocks.items()}
    named = roots(project, [*project["dependencies"], *extras[extra]])
    building = {canonical(each) for each in tables["build-system"]["requires"]}
    wanted = _with_all_needed(building | set(named) - present, askers, present)
    for name in wanted:
        if name not in blocks:
            raise ValueError(
                f"{pyproject.name} asks for {name}, which the lock lacks; run: make lock"
            )
    return {
        HASHED: _text(files[HASHED], set(wanted)),
        PINNED: _text(files[PINNED], set(named) - present),
    }


def split(text: str) -> dict[str, str]:
    """Both files of the lock from what uv wrote."""
    blocks = read(text)
    pinned = {name for name, lines in blocks.items() if OTHER_BUILDS.match(lines[0])}
    without = {
        name: [line.removesuffix(" \\") for line in blocks[name] if "--hash=" not in line]
        for name in pinned
    }
    return {HASHED: _text(blocks, blocks.keys() - pinned), PINNED: _text(without, pinned)}


def main() -> None:
    """Run the command line; prints one line and returns status 2 on failure."""
    parser = argparse.ArgumentParser(description="Select lines of the lock, or write it anew.")
    commands = parser.add_subparsers(dest="command", required=True)
    selecting = commands.add_parser("select")
    selecting.add_argument("out", type=Path)
    selecting.add_argument("--extra")
    selecting.add_argument("--lacking", action="store_true", help="only what this Python lacks")
    selecting.add_argument("--torch", help="the build of torch, as an index names it")
    splitting = commands.add_parser("split")
    splitting.add_argument("file", type=Path)
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


def _with_all_needed(names: set[str], askers: dict[str, set[str]], present: set[str]) -> list[str]:
    """Names, and their requirements that are not present, recursively."""
    wanted = list(names)
    for name in wanted:
        wanted += [
            other
            for other, asking in askers.items()
            if name in asking and other not in present and other not in wanted
        ]
    return wanted


def _askers(lines: list[str]) -> set[str]:
    """The packages that need a package, by the comment of its lines."""
    said = (re.fullmatch(r"\s+#\s+(?:via\s*)?(\S*).*", line) for line in lines)
    return {canonical(each[1]) for each in said if each is not None and each[1]}


def _text(blocks: dict[str, list[str]], names: Iterable[str]) -> str:
    return "".join("\n".join(blocks[name]) + "\n" for name in sorted(names & blocks.keys()))


def _write(directory: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (directory / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
