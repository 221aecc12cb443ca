"""The sub-command `bench`: its arguments and what they call; heavy imports wait until it runs."""

import argparse
import json
import sys
from typing import Any

from mlperf_bert.bench import cost_cli, loader_cli, optimizer_cli
from mlperf_bert.bench.options import HEAD_SIZE, add_attention, add_numbers, model_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the measurements, which are sub-commands of `bench`."""
    measurements = parser.add_subparsers(required=True, metavar="MEASUREMENT")
    against = measurements.add_parser(
        "against", help="our training step against that of `transformers`, which pads"
    )
    add_numbers(
        against,
        (
            ("layers", None, "layers of the encoder"),
            ("hidden", None, "channels of a token"),
            ("heads", None, f"attention heads (default: hidden / {HEAD_SIZE})"),
            ("batch", 16, "sequences a step"),
            ("vocab", 30522, "words"),
            ("max-length", 512, "tokens of a sequence at most"),
            ("threads", 2, "CPU threads of both sides"),
            ("steps", 12, "measured steps of each side at most"),
            ("seed", 1, "of weights, samples and dropout"),
        ),
        required=("layers", "hidden"),
    )
    add_attention(against, default="auto")
    against.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="begin no step after this, once every batch was measured (default 300)",
    )
    against.add_argument(
        "--dropout", type=float, default=0.1, metavar="P", help="of both sides (default 0.1)"
    )
    against.add_argument("--json", action="store_true", help="print one JSON object")
    against.set_defaults(measure=_against)
    cost_cli.add_arguments(
        measurements.add_parser("cost", help="data.cost_a and data.cost_b of a model, measured")
    )
    loader_cli.add_arguments(
        measurements.add_parser("loader", help="our loader against nvidia-dali's and torch's")
    )
    optimizer_cli.add_arguments(
        measurements.add_parser("optimizer", help="our update against a loop and torch's")
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen measurement. Raises ConfigError for what the user can mend."""
    return int(args.measure(args))


def _against(args: argparse.Namespace) -> int:
    model = model_of(args)  # mistakes show before torch is imported
    import torch

    from mlperf_bert.bench.against import Settings, compare

    settings = Settings(
        model=model,
        batch_size=args.batch,
        threads=args.threads,
        steps=args.steps,
        seconds=args.seconds,
        seed=args.seed,
    )
    result = compare(
        settings, torch.device("cpu"), lambda line: print(line, file=sys.stderr, flush=True)
    )
    print(json.dumps(result) if args.json else _in_words(result))
    return 0


def _in_words(result: dict[str, Any]) -> str:
    rows = (
        ("our step", result["ours_samples_per_s"], None),
        ("transformers, padded to the maximum", result["padded_samples_per_s"], "ratio_padded"),
        (
            "transformers, padded to the longest",
            result["padded_to_longest_samples_per_s"],
            "ratio_padded_to_longest",
        ),
        ("our encoder alone", result["ours_encoder_samples_per_s"], None),
        (
            "transformers' encoder alone, padded",
            result["padded_encoder_samples_per_s"],
            "ratio_encoder",
        ),
    )
    lines = [
        f"{result['layers']} layers, hidden {result['hidden']}, {result['heads']} heads, "
        f"{result['vocabulary']} words, batch {result['batch']}, {result['precision']} on "
        f"{result['device']}, {result['threads']} threads",
        f"mean length {result['mean_length']:.1f} of at most {result['max_length']}, "
        f"{result['distinct_batches']} batches, {result['steps']} steps of each, dropout "
        f"{result['dropout']}, {result['optimizer']}",
        "a step is forward, backward and update, its batch ready; an encoder's is forward and "
        "backward",
        f"attention: ours {result['ours_attention']}, transformers' {result['padded_attention']}",
    ]
    for name, rate, ratio in rows:
        times = ""
        if ratio:
            low, middle, high = result[f"{ratio}_range"]
            times = f"  ours is {result[ratio]:.2f} times that"
            times += f" (single steps {low:.1f} .. {middle:.1f} .. {high:.1f})"
        lines.append(f"{name:36} {rate:9.2f} samples/s{times}")
    lines.append(f"transformers without padding: not measured ({result['unpadded_peer_reason']})")
    return "\n".join(lines)
