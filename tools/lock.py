"""The lock: which lines of requirements/ an installation takes, and how they are written anew.

    python3 tools/lock.py select OUT [--extra NAME] [--lacking]
    .venv/bin/python tools/lock.py renew [options of `uv pip compile`, such as --upgrade]

`hashed.txt` has each package's version and the digests of its files, for every Python and system;
`pinned.txt` has torch, Triton and CUDA's libraries by version alone, as indexes have builds of
their own of them. `select` writes files of both names into OUT: what pyproject.toml needs with an
extra, but of `pinned.txt` only what it names itself, as a CPU's torch needs nothing of the rest.
It runs before anything is installed.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
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
    """The lines of each package, by its name: requirement, digests, and who asks for it."""
    blocks: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line[:1].isalnum():
            lines = blocks.setdefault(canonical(line), [])  # twice, for two versions of Python
        if line[:1].isalnum() or line.startswith(" "):
            lines.append(line)
    return blocks


def roots(project: dict[str, Any], requirements: Iterable[str]) -> list[str]:
    """Names of requirements; one of the project's own extras stands for what the extra asks for."""
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
        pyproject: whose requirements.
        extra: one of its optional groups.
        present: packages that stay as they are, with all that they need; not what builds a wheel.

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
    wanted = list(building | set(named) - present)
    for name in wanted:
        if name not in blocks:
            raise ValueError(
                f"{pyproject.name} asks for {name}, which the lock lacks; run: make lock"
            )
        wanted += [
            other
            for other, names in askers.items()
            if name in names and other not in present and other not in wanted
        ]
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


def renew(options: list[str]) -> None:
    """Resolve again, for every extra, system and Python at once; versions stay where they can."""
    uv = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
    if uv is None:
        raise ValueError("needs uv; run: make setup")
    lock = ROOT / "requirements"
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "lock.txt")
        out.write_text("".join((lock / name).read_text("utf-8") for name in (HASHED, PINNED)))
        command = [uv, "pip", "compile", "--quiet", "--universal", "--all-extras", "--no-header"]
        command += ["--generate-hashes", "--python-version=3.11", "--fork-strategy=fewest"]
        subprocess.run(
            [*command, *options, f"--output-file={out}", "pyproject.toml"], check=True, cwd=ROOT
        )
        _write(lock, split(out.read_text("utf-8")))


def main() -> None:
    """Do what the command line says; one line and status 2 where that cannot be done."""
    parser = argparse.ArgumentParser(description="Select lines of the lock, or write it anew.")
    commands = parser.add_subparsers(dest="command", required=True)
    selecting = commands.add_parser("select")
    selecting.add_argument("out", type=Path)
    selecting.add_argument("--extra")
    selecting.add_argument("--lacking", action="store_true", help="only what this Python lacks")
    commands.add_parser("renew")
    arguments, rest = parser.parse_known_args()
    try:
        if arguments.command == "renew":
            renew(rest)
            return
        present = {canonical(each.name) for each in distributions()} if arguments.lacking else set()
        if present:
            print("kept:", ", ".join(sorted(present)))
        texts = select(ROOT / "requirements", ROOT / "pyproject.toml", arguments.extra, present)
        _write(arguments.out, texts)
    except ValueError as error:
        print(f"tools/lock.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except subprocess.CalledProcessError as error:  # uv has said why
        sys.exit(error.returncode)


def _askers(lines: list[str]) -> set[str]:
    """Who asks for a package, by the comment of its lines."""
    said = (re.fullmatch(r"\s+#\s+(?:via\s*)?(\S*).*", line) for line in lines)
    return {canonical(each[1]) for each in said if each is not None and each[1]}


def _text(blocks: dict[str, list[str]], names: Iterable[str]) -> str:
    return "".join("\n".join(blocks[name]) + "\n" for name in sorted(names & blocks.keys()))


def _write(directory: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (directory / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
