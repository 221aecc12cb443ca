"""BERT pre-training as an MLPerf benchmark; README.md at the top of the repository has the tour."""

import importlib.metadata


def package_version() -> str:
    """What is installed; "from source" where this runs out of a tree."""
    try:
        return importlib.metadata.version("mlperf-bert")
    except importlib.metadata.PackageNotFoundError:
        return "from source"


def git_commit() -> str | None:
    """The commit of the tree this package runs from, with `-dirty` where it was changed."""
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
