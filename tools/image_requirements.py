"""For the Dockerfile: which of pyproject.toml's dependencies the base image lacks, and which not.

    python3 image_requirements.py pyproject.toml

writes requirements.txt (to install) and constraints.txt (to keep) into the current directory. What
the base has stays in its version, whatever pyproject.toml asks for: an image's torch was built for
its CUDA, and often has a version from before the release (2.13.0a0), which pip would replace.
"""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def split(dependencies: list[str]) -> tuple[list[str], list[str]]:
    """Requirements whose package is not installed, and `name==version` of those that are."""
    lacking, kept = [], []
    for requirement in dependencies:
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        try:
            kept.append(f"{name[0]}=={version(name[0])}")
        except PackageNotFoundError:
            lacking.append(requirement)
    return lacking, kept


def main(pyproject: Path) -> None:
    """Write both files and print what they say."""
    lacking, kept = split(tomllib.loads(pyproject.read_text())["project"]["dependencies"])
    Path("requirements.txt").write_text("\n".join(lacking) + "\n")
    Path("constraints.txt").write_text("\n".join(kept) + "\n")
    print("kept from the base image:", ", ".join(kept) or "nothing")
    print("to be installed:", ", ".join(lacking) or "nothing")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
