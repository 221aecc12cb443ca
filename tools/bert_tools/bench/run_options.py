"""Options of the measurements that train as a run does, and the RunConfig that they make."""

import argparse
from typing import Any

from bert_tools.bench.options import HEAD_SIZE, add_numbers, check_numbers
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import config_from_tables, load_config
from mlperf_bert.config.options import add_config
from mlperf_bert.config.run_config import RunConfig

# Options of whole numbers: setting, value without --config (None: must be given), meaning.
_NUMBERS = {
    "layers": ("model.num_layers", None, "layers of the encoder"),
    "hidden": ("model.hidden_size", None, "channels of a token"),
    "heads": ("model.num_heads", None, f"attention heads (default: hidden / {HEAD_SIZE})"),
    "vocab": ("model.vocab_size", 30522, "words"),
    "max_length": ("data.max_seq_length", 512, "tokens of a sequence at most"),
    "batch": ("parallel.local_batch_size", 16, "sequences a forward"),
    "accum": ("parallel.grad_accum_steps", 1, "forwards a step"),
}
# Options of names; the config says which there are.
_NAMES = {
    "precision": "model.precision",
    "attention": "model.attention",
    "kernels": "model.kernels",
    "head": "model.head",
    "step_mode": "run.step_mode",
    "optimizer": "optim.name",
}
_MOST_STEPS = 1000  # learning rates of a config from options; a measurement starts again behind it


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is trained, on what, from which seed, and how the result is printed."""
    add_config(parser, "as one rank of this config", required=False)
    rows = [
        (name.replace("_", "-"), None, _help(text, default))
        for name, (_, default, text) in _NUMBERS.items()
    ]
    add_numbers(parser, rows)
    parser.add_argument("--dropout", type=float, metavar="P", help="without --config (default 0.1)")
    for name, setting in _NAMES.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, metavar="NAME", help=f"without --config: {setting}")
    add_numbers(
        parser,
        (
            ("threads", 2, "CPU threads"),
            ("seed", 1, "of weights, samples and dropout"),
        ),
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def make_config(args: argparse.Namespace) -> RunConfig:
    """The config of one rank, from --config and --set, or from options. Raises ConfigError."""
    check_numbers(args)
    seed = [f"run.seed={args.seed}", f'run.device="{args.device}"']
    if args.config:
        _refuse_options(args)
        one_rank = ["parallel.nodes=1", "parallel.ranks_per_node=1"]
        return load_config(args.config, [*args.set, *one_rank, *seed])
    if args.set:
        raise ConfigError("--set", "is given without --config", "give a config, or use options")
    return config_from_tables(_tables(args), "options")


def _help(text: str, default: int | None) -> str:
    return f"without --config: {text}" + (f" (default {default})" if default else "")


def _refuse_options(args: argparse.Namespace) -> None:
    for name in (*_NUMBERS, *_NAMES, "dropout"):
        if getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(option, "is given beside --config", "use --set to change the config")


def _tables(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The config of the options as nested dictionaries."""
    for name in ("layers", "hidden"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name}", "is missing", "give it, or a --config")
    dropout = 0.1 if args.dropout is None else args.dropout
    values: dict[str, Any] = {
        "run.max_steps": _MOST_STEPS,
        "run.seed": args.seed,
        "run.device": args.device,
        "model.num_heads": max(1, args.hidden // HEAD_SIZE),
        "model.intermediate_size": 4 * args.hidden,
        "model.hidden_dropout": dropout,
        "model.attention_dropout": dropout,
        "optim.name": "lamb",
        "optim.learning_rate": 1e-4,
        "schedule.decay_steps": _MOST_STEPS,
        "eval.target_accuracy": 0.72,
    }
    for name, (setting, default, _) in _NUMBERS.items():
        value = getattr(args, name)
        if value is not None or default is not None:
            values[setting] = default if value is None else value
    values["model.max_position_embeddings"] = values["data.max_seq_length"]
    for name, setting in _NAMES.items():
        if getattr(args, name) is not None:
            values[setting] = getattr(args, name)
    tables: dict[str, dict[str, Any]] = {}
    for setting, value in values.items():
        section, _, field = setting.partition(".")
        tables.setdefault(section, {})[field] = value
    return tables
