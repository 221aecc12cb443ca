"""The answer of `plan buckets` as a table to read."""

from collections.abc import Sequence

from mlperf_bert.distributed.bucket_plan import MIB, Bucket

_HEADER = ("bucket", "tensors", "parameters", "MiB", "earliest start", "first tensor .. last")
_LEGEND = (
    "earliest start: when a bucket's last gradient is ready, as a share of backward's multiply-adds"
)


def in_words(title: str, buckets: Sequence[Bucket]) -> str:
    """The title, a line of column names over aligned rows, and what cannot be overlapped."""
    cells = [_HEADER, *(_cells(number, bucket) for number, bucket in enumerate(buckets))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = [
        "  ".join(text.rjust(width) for text, width in zip(line[:-1], widths, strict=False))
        + f"  {line[-1]}"
        for line in cells
    ]
    total = sum(bucket.num_bytes for bucket in buckets)
    late = sum(bucket.num_bytes for bucket in buckets if bucket.earliest_start >= 1)
    return "\n".join(
        [
            title,
            f"{len(buckets)} buckets, {sum(bucket.numel for bucket in buckets):,} parameters, "
            f"{total / MIB:.1f} MiB; {late / MIB:.1f} MiB ({late / total:.0%}) are complete only "
            "when backward ends",
            "",
            *table,
            "",
            _LEGEND,
        ]
    )


def _cells(number: int, bucket: Bucket) -> tuple[str, ...]:
    return (
        str(number),
        str(len(bucket.names)),
        f"{bucket.numel:,}",
        f"{bucket.num_bytes / MIB:.2f}",
        f"{bucket.earliest_start:.1%}",
        " .. ".join(dict.fromkeys((bucket.names[0], bucket.names[-1]))),
    )
