"""Pre-train BERT as an MLPerf benchmark. The README.md of the repository gives an overview."""

import importlib.metadata


def package_version() -> str:
    """Return the version of the installed package, or "from source" if it is not installed."""
    try:
        return importlib.metadata.version("mlperf-bert")
    except importlib.metadata.PackageNotFoundError:
        return "from source"


def git_commit() -> str | None:
    """Return the git commit of this package's checkout, or None if it is unknown.

    If the checkout has uncommitted changes, `-dirty` is appended.
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
