"""The measurement `bench optimizer`: its arguments and what they call; torch waits for its run."""

import argparse
import json
import sys
from typing import Any

from bert_tools.bench.options import add_numbers, model_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench optimizer`."""
    add_numbers(
        parser,
        (
            ("layers", 12, "layers of the encoder"),
            ("hidden", 768, "channels of a token"),
            ("vocab", 30522, "words"),
            ("threads", 2, "CPU threads"),
            ("steps", 12, "measured updates by each at most"),
            ("seed", 1, "of weights and gradients"),
        ),
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="of each rule: begin no further update after this (default 300)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    # What the rest of the model is like does not change an update.
    parser.set_defaults(measure=_measure, heads=None, max_length=512, dropout=0.0, attention="auto")


def _measure(args: argparse.Namespace) -> int:
    model = model_of(args)  # mistakes show before torch is imported
    from bert_tools.bench.optimizer import Settings, compare
    from mlperf_bert.distributed.binding import choose_device
    from mlperf_bert.distributed.launch import read_rank_info

    settings = Settings(
        model=model,
        threads=args.threads,
        steps=args.steps,
        seconds=args.seconds,
        seed=args.seed,
    )
    device = choose_device(args.device, read_rank_info())
    result = compare(settings, device, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(result) if args.json else _in_words(result))
    return 0


def _in_words(result: dict[str, Any]) -> str:
    lines = [
        f"{result['layers']} layers, hidden {result['hidden']}, {result['vocabulary']} words: "
        f"{result['parameters']:,} parameters in {result['tensors']} tensors, fp32 on "
        f"{result['device']}, {result['threads']} threads",
        f"one update, median of {result['rows'][0]['steps']}; ratio: updates while the loop over "
        "tensors does one; difference: of any",
        "weight from the loop's at the end, at most "
        f"{result['largest_difference_allowed']:g}; single ones: lowest, median, highest ratio",
        f"{'rule':6} {'updater':32} {'ms':>8} {'ratio':>6}  {'single ones':18} {'difference':>10}",
    ]
    for row in result["rows"]:
        singles = ", ".join(f"{ratio:.2f}" for ratio in row["ratio_range"])
        lines.append(
            f"{row['rule']:6} {row['updater']:32} {row['ms']:8.1f} {row['ratio']:6.2f} "
            f" {singles:18} {row['largest_difference']:10.1e}"
        )
    return "\n".join(lines)
