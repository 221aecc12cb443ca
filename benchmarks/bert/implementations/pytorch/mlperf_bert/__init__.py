"""BERT pre-training as an MLPerf benchmark. The repository's README.md gives an overview."""

import importlib.metadata


def package_version() -> str:
    """Return the installed version, or "from source" if the package is not installed."""
    try:
        return importlib.metadata.version("mlperf-bert")
    except importlib.metadata.PackageNotFoundError:
        return "from source"


def git_commit() -> str | None:
    """Return the commit of the checkout that this package runs from, or None if unknown.

    `-dirty` is appended if the checkout has uncommitted changes.
    """
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
