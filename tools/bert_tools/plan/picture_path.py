"""Where the picture of an answer goes, tried before anything is computed."""

import os
from pathlib import Path

from mlperf_bert.common.errors import ConfigError


def check_picture(path: Path) -> Path:
    """The path, where a PNG can be written to it.

    Raises ConfigError for a path that cannot be a picture's, DataError for one not to be written.
    """
    from mlperf_bert.common.atomic import check_writable

    remedy = "name a .png file in a directory that exists"
    if os.path.isdir(path):
        raise ConfigError("--out", f"{path} is a directory", remedy)
    if not os.path.isdir(path.parent):
        raise ConfigError("--out", f"{path} lies in a directory that does not exist", remedy)
    if path.suffix != ".png":
        raise ConfigError("--out", f"{path} does not end in .png", remedy)
    check_writable(path)
    return path
