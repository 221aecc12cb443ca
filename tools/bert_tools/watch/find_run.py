"""Which run of a directory is watched: the one that is named, or the newest of several."""

import os
import re
from pathlib import Path

from mlperf_bert.common.errors import DataError

_RUN = re.compile(r"run_(\d{1,6})")
_OF_A_RUN = ("metrics.jsonl", "config.toml", "outcome.json")


def find_run(path: Path) -> Path | None:
    """The directory `run_<i>` that `path` is, or has, the highest i of several; None: not yet.

    Raises DataError where `path` is no directory or cannot be read.
    """
    newest: tuple[int, str] | None = None
    is_run = _RUN.fullmatch(path.name) is not None
    try:
        with os.scandir(path) as entries:  # one at a time: anything may lie beside the runs
            for entry in entries:
                is_run |= entry.name in _OF_A_RUN
                if (match := _RUN.fullmatch(entry.name)) and entry.is_dir():
                    newest = max(newest or (-1, ""), (int(match[1]), entry.name))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or "is no name of a directory"
        remedy = "give a run directory, which train makes below runs/"
        raise DataError(str(path), problem, remedy) from None
    if newest:
        return path / newest[1]
    return path if is_run else None
