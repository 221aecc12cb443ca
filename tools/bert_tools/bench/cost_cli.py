"""The measurement `bench cost`: its arguments and what they call; torch waits until it runs."""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from bert_tools.bench.options import add_attention, add_numbers, check_numbers, model_of
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.options import add_config
from mlperf_bert.config.sections import MAX_PREDICTIONS

# The model where there is no config and no option says another.
DEFAULTS: dict[str, Any] = {
    "layers": 2,
    "hidden": 256,
    "heads": None,
    "vocab": 30522,
    "max_length": 512,
    "dropout": 0.1,
    "attention": "auto",
    "precision": "fp32",
}
SEQUENCES = 6  # of the longest length, in the larger batches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench cost`."""
    add_config(parser, "measure this config's model", required=False)
    rows = (
        ("layers", "layers of the encoder"),
        ("hidden", "channels of a token"),
        ("heads", "attention heads"),
        ("vocab", "words"),
        ("max-length", "tokens of the longest sequences"),
    )
    add_numbers(parser, [(name, None, f"without --config: {text}") for name, text in rows])
    parser.add_argument("--dropout", type=float, metavar="P", help="without --config")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "bf16_autocast", "fp8"), help="without --config"
    )
    add_attention(parser, default=None)
    add_numbers(
        parser,
        (
            ("tokens", None, "of the larger batches (default: about those of a rank's forward)"),
            ("threads", 2, "CPU threads"),
            ("seed", 1, "of weights, samples and dropout"),
        ),
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--seconds",
        type=float,
        default=45.0,
        metavar="S",
        help="begin no further round after this (default 45)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(measure=measure)


def measure(args: argparse.Namespace) -> int:
    """Run `bench cost`. Raises ConfigError for what the user can mend."""
    check_numbers(args)
    shape = _from_config(args) if args.config else _from_options(args)  # before torch is imported
    from bert_tools.bench.cost import CostSettings, in_words, measure_cost
    from mlperf_bert.distributed.binding import choose_device
    from mlperf_bert.distributed.launch import read_rank_info

    settings = CostSettings(**shape, threads=args.threads, seconds=args.seconds, seed=args.seed)
    device = choose_device(args.device, read_rank_info())
    result = measure_cost(settings, device, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(result) if args.json else in_words(result))
    return 0


def _from_config(args: argparse.Namespace) -> dict[str, Any]:
    given = [name for name in DEFAULTS if getattr(args, name) is not None]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise ConfigError(option, "is given beside --config", "use --set to change the config")
    config = load_config(args.config, args.set)
    tokens = config.parallel.local_batch_size * config.data.max_seq_length // 2
    return {
        "model": config.model,
        "max_length": config.data.max_seq_length,
        "max_predictions": config.data.max_predictions,
        "tokens": args.tokens or tokens,
    }


def _from_options(args: argparse.Namespace) -> dict[str, Any]:
    if args.set:
        raise ConfigError("--set", "is given without --config", "give a config, or use options")
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return {
        "model": replace(model_of(args), precision=args.precision),
        "max_length": args.max_length,
        "max_predictions": MAX_PREDICTIONS,
        "tokens": args.tokens or SEQUENCES * args.max_length,
    }
