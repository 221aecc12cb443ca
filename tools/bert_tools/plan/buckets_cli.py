"""The question `plan buckets`: its arguments, what they call, and the answer as a table to read."""

import argparse
import json
import typing
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bert_tools.plan.buckets_model import QkvLayout, backward_order
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.options import add_config
from mlperf_bert.distributed.bucket_plan import MIB, Bucket

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}

_HEADER = ("bucket", "tensors", "parameters", "MiB", "earliest start", "first tensor .. last")
_LEGEND = (
    "earliest start: when a bucket's last gradient is ready, as a share of backward's multiply-adds"
)


def add_buckets(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the question."""
    add_config(parser)
    parser.add_argument(
        "--bucket-cap-mb",
        type=float,
        metavar="MIB",
        help="when a bucket is full (default: parallel.bucket_cap_mb)",
    )
    parser.add_argument(
        "--dtype", choices=ELEMENT_BYTES, help="of the gradients (default: the config's)"
    )
    parser.add_argument(
        "--qkv",
        choices=typing.get_args(QkvLayout),
        default="separate",
        help="attention's three projections as they are, or as if they were one (default separate)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="draw the timeline")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(answer=answer_buckets)


def answer_buckets(args: argparse.Namespace) -> int:
    """Print the buckets of a config's model. Raises ConfigError for what the user can mend."""
    from mlperf_bert.common.atomic import write_file
    from mlperf_bert.config.files import load_config
    from mlperf_bert.distributed.bucket_plan import plan_buckets

    cap_setting = [] if args.bucket_cap_mb is None else [_cap_setting(args.bucket_cap_mb)]
    config = load_config(args.config, [*args.set, *cap_setting])
    if args.out is not None and (args.out.is_dir() or not args.out.parent.is_dir()):
        problem = f"{args.out} is a directory, or lies in one that does not exist"
        raise ConfigError("--out", problem, "name a PNG file in a directory that does")
    precision, cap_mb = config.model.precision, config.parallel.bucket_cap_mb
    dtype = args.dtype or (precision if precision in ELEMENT_BYTES else "fp32")  # autocast's
    num_tokens, num_masked = config.data.max_seq_length, config.data.max_predictions
    gradients = backward_order(config.model, args.qkv, num_tokens, num_masked)
    buckets = plan_buckets(gradients, ELEMENT_BYTES[dtype], cap_mb)
    title = (
        f"{args.config.stem}: {dtype} gradients, q, k, v {args.qkv}, bucket cap {cap_mb:g} MiB; "
        f"{num_tokens} tokens, {num_masked} masked"
    )
    if args.out is not None:
        from bert_tools.plan.buckets_plot import buckets_picture

        write_file(args.out, buckets_picture(title, buckets))
    if args.json:
        answer = {
            "schema_version": 1,
            "dtype": dtype,
            "qkv": args.qkv,
            "bucket_cap_mb": cap_mb,
            "tokens_per_sequence": num_tokens,
            "masked_per_sequence": num_masked,
            "picture": None if args.out is None else str(args.out),
            "buckets": [asdict(bucket) for bucket in buckets],
        }
        print(json.dumps(answer))
        return 0
    print(in_words(title, buckets))
    if args.out is not None:
        print(f"picture: {args.out}")
    return 0


def _cap_setting(cap_mb: float) -> str:
    if not 0 < cap_mb < float("inf"):
        problem = f"is {cap_mb:g}"
        raise ConfigError("--bucket-cap-mb", problem, "set it to a finite number above zero")
    return f"parallel.bucket_cap_mb={cap_mb!r}"


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
