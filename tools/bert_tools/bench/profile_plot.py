"""One step as a picture: what ran when, a bar for each stream or thread, coloured by kind."""

import io
import re
from collections.abc import Sequence
from types import MappingProxyType

from bert_tools.bench.spans import Span

OTHER = "other"
# The first pattern that a name contains says its kind; our own kernels' names begin with "_".
_KINDS = (
    ("attention", "#d9722e", r"attention|flash|fmha|sdpa|attend"),
    (
        "matrix product",
        "#2f7d4f",
        r"gemm|matmul|addmm|::mm|::bmm|baddbmm|linear|cutlass|nvjet|xmma",
    ),
    (
        "update",
        "#8a63b0",
        r"adam|lamb|optim|multi_tensor|clip|norm_squared|^_(moments_and_squares|sum_squares|apply)",
    ),
    ("normalisation", "#c9a227", r"layer_?norm|norm"),
    ("loss", "#b03a5b", r"softmax|nll|cross_entropy"),
    (
        "copy",
        "#9a9a9a",
        r"memcpy|memset|copy|fill|zero|index|gather|scatter|cat|embedding|^_transpose",
    ),
    (
        "elementwise",
        "#7fb3d8",
        r"elementwise|gelu|dropout|^_keep_bits|^_cast_to_fp8|add|mul|sum|reduce|vectorized",
    ),
)
_COLOURS = MappingProxyType({kind: colour for kind, colour, _ in _KINDS} | {OTHER: "#dddddd"})


def kind_of(name: str) -> str:
    """What a kernel or operator is for, as far as its name tells."""
    lower = name.lower()
    return next((kind for kind, _, pattern in _KINDS if re.search(pattern, lower)), OTHER)


def timeline(spans: Sequence[Span], title: str) -> bytes:
    """A PNG of spans in the order of their start: what an operator called is drawn over it."""
    from matplotlib.figure import Figure  # a profile without a picture needs no matplotlib
    from matplotlib.patches import Patch

    lanes = sorted({span.lane for span in spans})
    figure = Figure(figsize=(14, 1.8 + 0.6 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    first = spans[0].start_us
    for place, lane in enumerate(lanes):
        of_lane = [span for span in spans if span.lane == lane]
        axes.broken_barh(
            [
                ((span.start_us - first) / 1e3, (span.end_us - span.start_us) / 1e3)
                for span in of_lane
            ],
            (place - 0.4, 0.8),
            facecolors=[_COLOURS[kind_of(span.name)] for span in of_lane],
            linewidth=0,
        )
    axes.set_yticks(range(len(lanes)), [f"lane {place}" for place in range(len(lanes))])
    axes.set_xlabel("ms since the step's first kernel or operator")
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    present = {kind_of(span.name) for span in spans}
    figure.legend(
        handles=[Patch(color=_COLOURS[kind], label=kind) for kind in _COLOURS if kind in present],
        loc="outside lower center",
        ncols=len(present),
        frameon=False,
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
