"""Pictures of the tools, drawn by matplotlib if it is installed (extra `plots`)."""

import io
from typing import TYPE_CHECKING

from mlperf_bert.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
