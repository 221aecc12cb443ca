"""BERT pre-training as an MLPerf benchmark; the repository's README.md gives an overview."""

import importlib.metadata


def package_version() -> str:
    """The installed version; "from source" if the package runs out of a tree."""
    try:
        return importlib.metadata.version("mlperf-bert")
    except importlib.metadata.PackageNotFoundError:
        return "from source"


def git_commit() -> str | None:
    """The commit of the tree this package runs from, with `-dirty` if the tree was changed."""
    import subprocess
    from pathlib import Path

    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
