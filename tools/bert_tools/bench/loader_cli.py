"""The measurement `bench loader`: its arguments and what they call; torch waits until it runs."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bert_tools.bench.options import add_numbers, check_numbers
from mlperf_bert.common.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench loader`."""
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="a made-up set, made there where none is (default: a temporary one)",
    )
    add_numbers(
        parser,
        (
            ("megabytes", 220, "of the shard, where it is made"),
            ("rounds", 5, "visits of each loader, the file in memory"),
            ("seed", 1, "of the set and of the order of its samples"),
        ),
    )
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=[16, 56],
        metavar="N",
        help="sequences a batch (default 16 56)",
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="of one visit (default 2)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(measure=_measure)


def _measure(args: argparse.Namespace) -> int:
    check_numbers(args)
    for option, value in (
        ("--megabytes", args.megabytes),
        ("--rounds", args.rounds),
        ("--batches", min(args.batches)),
    ):
        if value < 1:
            raise ConfigError(option, f"is {value}", "set it to 1 at least")
    from bert_tools.bench.loader import Settings, compare, set_directory

    settings = Settings(
        batch_sizes=tuple(args.batches),
        set_bytes=args.megabytes * 10**6,
        rounds=args.rounds,
        seconds=args.seconds,
        seed=args.seed,
    )
    with set_directory(args.dir) as set_dir:
        result = compare(set_dir, settings, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(result) if args.json else _in_words(result))
    return 0


def _in_words(result: dict[str, Any]) -> str:
    lines = [
        f"{result['num_samples']:,} samples of {result['mean_length']:.1f} tokens on average in "
        f"{result['set_bytes'] / 1e6:,.0f} MB, {result['cpus']} CPUs; warm: median of "
        f"{result['rounds']} visits of {result['seconds']:g} s; cold: {result['cold_batches']} "
        "batches after the first, file not in memory",
        f"{'loader':14} {'cache':5} {'batch':>5} {'batches/s':>10} {'samples/s':>10}  ours is",
    ]
    for row in result["rows"]:
        lines.append(
            f"{row['loader']:14} {row['cache']:5} {row['batch_size']:5} "
            f"{row['batches_per_s']:10,.0f} {row['samples_per_s']:10,.0f} {row['ratio']:7.2f} x"
        )
    if result["dali_reason"]:
        lines.append(f"nvidia-dali: not measured ({result['dali_reason']})")
    return "\n".join(lines)
