"""The answer of `plan buckets` as a picture: when in backward each bucket fills and can be sent."""

import io
from collections.abc import Sequence

from matplotlib.figure import Figure

from mlperf_bert.distributed.bucket_plan import MIB, Bucket

ROW_INCHES = 0.19


def buckets_picture(title: str, buckets: Sequence[Bucket]) -> bytes:
    """A PNG with a row for each bucket: filling until its dot, from which on it can be sent."""
    figure = Figure(figsize=(9, 1.6 + ROW_INCHES * len(buckets)), layout="constrained")
    axes = figure.subplots()
    begun = 0.0
    for row, bucket in enumerate(buckets):
        start = bucket.earliest_start
        axes.barh(row, start - begun, left=begun, height=0.7, color="#7fb3d8")
        axes.barh(row, 1 - start, left=start, height=0.7, color="#2f7d4f", alpha=0.25)
        axes.plot(start, row, "o", color="#2f7d4f", markersize=4)
        axes.text(1.03, row, f"{bucket.num_bytes / MIB:.1f} MiB", va="center", fontsize=7)
        begun = start
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}" if value <= 1 else "")
    axes.set_xlabel("share of backward: blue, its gradients are made; green, it can be sent")
    axes.set_yticks(range(len(buckets)))
    axes.tick_params(axis="y", labelsize=7)
    axes.set_ylabel("bucket")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
