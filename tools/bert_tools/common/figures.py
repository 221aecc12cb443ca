"""Pictures of the tools, drawn by matplotlib if it is installed (extra `plots`)."""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_picture(path: Path, option: str = "--out") -> Path:
    """The path, checked before any computation that a picture can be written there.

    Raises ConfigError for a path unfit for a picture, and if matplotlib is not installed; DataError
    for a path that cannot be written.
    """
    from mlperf_bert.files import check_writable

    remedy = "name a .png file in a directory that exists"
    if os.path.isdir(path):
        raise ConfigError(option, f"{path} is a directory", remedy)
    if not os.path.isdir(path.parent):
        raise ConfigError(option, f"{path} lies in a directory that does not exist", remedy)
    if path.suffix != ".png":
        raise ConfigError(option, f"{path} does not end in .png", remedy)
    new_figure(1, 1)
    check_writable(path)
    return path


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches. Raises ConfigError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        remedy = "run in the checkout: tools/venv.sh plots"
        raise ConfigError("matplotlib", "is not installed, and draws the picture", remedy) from None
    return Figure(figsize=(width, height), layout="constrained")


def png(figure: "Figure", dots_per_inch: int = 100) -> bytes:
    """The figure as a PNG: the same bytes for the same figure."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return picture.getvalue()
