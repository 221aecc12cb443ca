"""Which run of a directory is watched: the one that is named, or the newest of several."""

import re
from pathlib import Path

from mlperf_bert.errors import DataError

_RUN = re.compile(r"run_(\d{1,6})")
_OF_A_RUN = ("metrics.jsonl", "config.toml", "outcome.json")


def find_run(path: Path) -> Path | None:
    """The directory `run_<i>` that `path` is, or has, the highest i of several; None: not yet.

    Raises DataError where `path` is no directory or cannot be read.
    """
    try:
        names = {each.name for each in path.iterdir()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or "is no name of a directory"
        remedy = "give a run directory, which train makes below runs/"
        raise DataError(str(path), problem, remedy) from None
    if names & set(_OF_A_RUN):
        return path
    found = {int(match[1]): name for name in names if (match := _RUN.fullmatch(name))}
    if found:
        return path / found[max(found)]
    return path if _RUN.fullmatch(path.name) else None
