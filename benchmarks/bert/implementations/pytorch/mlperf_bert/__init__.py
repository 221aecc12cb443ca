"""BERT pre-training as an MLPerf benchmark; README.md at the top of the repository has the tour."""

import importlib.metadata


def package_version() -> str:
    """What is installed; "from source" where this runs out of a tree."""
    try:
        return importlib.metadata.version("mlperf-bert")
    except importlib.metadata.PackageNotFoundError:
        return "from source"
