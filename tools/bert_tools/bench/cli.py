"""The sub-command `bench`: its measurements, their options, and the config to measure.

Torch is imported only when one of them runs.
"""

import argparse
import importlib
import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlperf_bert.config.files import load_config
from mlperf_bert.config.options import add_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import Bounds, option_name

if TYPE_CHECKING:
    import torch

BASE = Path(__file__).with_name("bench.toml")  # what is measured without --config
HEAD_SIZE = 64  # of every published BERT
MODERN = (  # as published, but for its size: arXiv 2412.13663
    *("model.architecture=modern", "model.objective=mlm", "model.layer_norm_epsilon=1e-5"),
    *("model.hidden_dropout=0", "model.attention_dropout=0"),
    *("data.masking=dynamic", "data.masking_rate=0.3"),
)
_BOUNDS = {
    "steps": Bounds(1, 10**7),
    "seconds": Bounds(1e-3, 1e6),
    "peak_seconds": Bounds(1e-12, 1e6),
    "threads": Bounds(1, 4096),
    "seed": Bounds(0, 2**63 - 1),
}


def _number(default: float, text: str) -> dict[str, Any]:
    kind, text = type(default), f"{text} (default {default:g})"
    return {"default": default, **_value(kind, "N" if kind is int else "S", text)}


def _value(kind: type, metavar: str, text: str) -> dict[str, Any]:
    return {"type": kind, "metavar": metavar, "help": text}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """`options` are arguments of `add_argument`; `settings` override bench.toml.

    The module of the same name has `measure` and `in_words`.
    """

    text: str
    options: dict[str, dict[str, Any]]
    settings: tuple[str, ...] = ()


MEASUREMENTS = {
    "against": Measurement(
        text="our training step against that of `transformers`, which pads",
        options={
            "steps": _number(12, "measured steps of each side at most"),
            "seconds": _number(300.0, "begin no step after this, once every batch was measured"),
            "architecture": {
                "choices": ("bert", "modern"),
                "default": None,
                "help": "of both sides (default: that of --config, or bert)",
            },
            "compile": {
                "action": argparse.BooleanOptionalAction,
                "default": True,
                "help": "also run the other side through torch.compile (default: yes)",
            },
            "by-layer": {
                "action": "store_true",
                "help": "compile each of its layers by itself, which takes less time",
            },
        },
    ),
    "train": Measurement(
        text="our training step: rate, MFU, memory",
        options={
            "steps": _number(40, "measured steps at most"),
            "seconds": _number(20.0, "about this long for measured steps"),
            # Long enough for clocks to fall.
            "peak-seconds": _number(3.0, "length of the long run of matrix products"),
            "profile": {
                "action": "store_true",
                "help": "list the step's kernels (CUDA) or operators (CPU) by their time",
            },
            "out": _value(
                Path,
                "FILE",
                "with --profile: torch's trace of one step, gzipped JSON (.json.gz) for Perfetto",
            ),
        },
    ),
    "optimizer": Measurement(
        text="our update against a loop and torch's",
        options={
            "steps": _number(12, "measured updates by each at most"),
            "seconds": _number(300.0, "per rule: begin no further update after this"),
        },
        settings=("model.num_layers=12", "model.hidden_size=768"),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the measurements, which are sub-commands of `bench`."""
    commands = parser.add_subparsers(dest="measurement", required=True, metavar="MEASUREMENT")
    for name, measurement in MEASUREMENTS.items():
        command = commands.add_parser(name, help=measurement.text)
        options = dict(measurement.options)
        add_config(command, "measure a rank of this config (default: small)", required=False)
        options["threads"] = _number(2, "CPU threads")
        options["seed"] = _number(1, "seed of weights, samples and dropout")
        command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        for option, arguments in options.items():
            command.add_argument(f"--{option}", **arguments)
        command.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the chosen measurement. Raises ConfigError for a user's mistake."""
    chosen = MEASUREMENTS[args.measurement]
    for name, bounds in _BOUNDS.items():
        number = getattr(args, name, None)
        if number is not None:
            bounds.check(option_name(name), number)
    names = (option.replace("-", "_") for option in chosen.options if option != "architecture")
    options = {name: getattr(args, name) for name in names}
    config = make_config(args)  # mistakes show before torch is imported
    device = _device(args)
    says_mode = args.config or any(each.startswith("run.step_mode") for each in args.set)
    if args.measurement == "against" and device.type == "cuda" and not says_mode:
        config = replace(config, run=replace(config.run, step_mode="captured"))
    module = importlib.import_module(f"bert_tools.bench.{args.measurement}")
    result = module.measure(config, device, _report, **options)
    print(json.dumps(result) if args.json else module.in_words(result))
    return 0


def make_config(args: argparse.Namespace) -> RunConfig:
    """The config of one rank, from --config or bench.toml, and --set. Raises ConfigError."""
    fixed = [f"run.seed={args.seed}", f'run.device="{args.device}"']
    architecture = getattr(args, "architecture", None)
    if args.config and architecture:
        fixed.append(f"model.architecture={architecture}")
    if args.config:
        one_rank = ["parallel.nodes=1", "parallel.ranks_per_node=1"]
        return load_config(args.config, [*args.set, *one_rank, *fixed])
    settings = MEASUREMENTS[args.measurement].settings
    if architecture == "modern":
        settings += MODERN
    return small_config(*settings, *args.set, *fixed)


def small_config(*settings: str) -> RunConfig:
    """bench.toml with `settings` as --set takes them. Raises ConfigError.

    Unless they are set, heads have 64 channels, the feed-forward halves are four times as wide as a
    token (gated ones 1.5 times, as published), there are as many positions as tokens, and of
    ModernBERT's tokens there is room to mask 30 %.
    """
    given = {name.strip(): value.strip() for name, _, value in (e.partition("=") for e in settings)}
    hidden, length = (
        re.fullmatch(r"\d{1,9}", given.get(name, ""))
        for name in ("model.hidden_size", "data.max_seq_length")
    )
    is_modern = given.get("model.architecture") == "modern"
    channels, tokens = int(hidden[0]) if hidden else 256, int(length[0]) if length else 512
    derived = [
        f"model.num_heads={max(1, channels // HEAD_SIZE)}",
        f"model.intermediate_size={3 * channels // 2 if is_modern else 4 * channels}",
        f"model.max_position_embeddings={tokens}",
    ]
    if is_modern:
        derived.append(f"data.max_predictions={max(1, tokens * 3 // 10)}")
    return load_config(BASE, [*derived, *settings])


def _device(args: argparse.Namespace) -> "torch.device":
    """The device in the options; also sets the number of CPU threads."""
    import torch

    from mlperf_bert.distributed.launch import choose_device, read_rank_info

    torch.set_num_threads(args.threads)
    return choose_device(args.device, read_rank_info())


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
