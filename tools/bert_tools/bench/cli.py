"""The command `bench`, with its sub-commands and their options.

torch is imported only when a measurement runs, so that `--help` and errors appear immediately.
"""

import argparse
import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tools.common.results import aligned
from mlperf_bert.arguments import Options, add_command
from mlperf_bert.config.bounds import Bounds, option_name
from mlperf_bert.config.files import add_config, config_to_tables, load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.extras import require_packages
from mlperf_bert.run.console import ProgressLines

if TYPE_CHECKING:
    import torch

BASE = Path(__file__).with_name("bench.toml")  # the config if --config is not given
OPTIMIZER_MODEL = (  # BERT-base, which `bench optimizer` measures if --config is not given
    *("model.num_layers=12", "model.hidden_size=768"),
    *("model.num_heads=12", "model.intermediate_size=3072"),
)
_BOUNDS = {
    "steps": Bounds(1, 10**7),
    "seconds": Bounds(1e-3, 1e6),
    "peak_seconds": Bounds(1e-12, 1e6),
    "threads": Bounds(1, 4096),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the measurements as sub-commands of `bench`.

    Each sub-command runs the function `measure` of the module that has the same name.
    """
    parser.description = "Measure training speed on this machine. Nothing is trained or saved."
    commands = parser.add_subparsers(dest="measurement", required=True, metavar="COMMAND")
    transformers = add_command(
        commands,
        "transformers",
        "compare this training step with that of Hugging Face transformers",
        "Measure training steps of this project and of Hugging Face transformers in turn, with the "
        "same model and the same sequence lengths, and print their speeds and the ratios.",
        "mlperf_bert bench transformers --steps 6 --no-compile",
    )
    compared = transformers.add_argument_group("what is compared")
    _add_common(transformers, compared, steps=12, seconds=300.0)
    compared.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure transformers with torch.compile (default: %(default)s)",
    )
    compared.add_argument(
        "--by-layer",
        action="store_true",
        help="compile each layer of transformers separately, to save compilation time",
    )
    _add_train(commands)
    optimizer = add_command(
        commands,
        "optimizer",
        "compare this project's optimizer with that of PyTorch",
        "Measure one update of all weights by this project's optimizer, by a loop over tensors and "
        "by PyTorch's fused optimizer, and print the times. The model is BERT-base unless a config "
        "is given.",
        "mlperf_bert bench optimizer --steps 3",
    )
    _add_common(optimizer, optimizer, steps=12, seconds=300.0)


def _add_train(commands: "argparse._SubParsersAction[Any]") -> None:
    train = add_command(
        commands,
        "train",
        "measure the speed and the memory of a training step",
        "Measure a training step of one rank, and print samples per second, memory and model FLOPs "
        "utilization (MFU), which is a fraction of the speed of matrix products on this machine.",
        "mlperf_bert bench train --steps 10 --profile",
    )
    measured = train.add_argument_group("what is measured")
    _add_common(train, measured, steps=40, seconds=20.0)
    measured.add_argument(
        "--peak-seconds",
        type=float,
        default=3.0,  # long enough for the clocks to slow down
        metavar="S",
        help="seconds to spend on measuring the speed of matrix products",
    )
    measured.add_argument(
        "--profile",
        action="store_true",
        help="also list the kernels (CUDA) or operators (CPU) that take the most time",
    )
    measured.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write torch's trace of one step to this .json.gz file (needs --profile)",
    )


def _add_common(
    command: argparse.ArgumentParser, measured: Options, *, steps: int, seconds: float
) -> None:
    add_config(measured, "measure one rank of a config (default: a built-in model)", required=False)
    limits = command.add_argument_group("duration and output")
    limits.add_argument(
        "--steps",
        type=int,
        default=steps,
        metavar="N",
        help="measure at most this many steps of each implementation (train: multiples of 4)",
    )
    limits.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        metavar="S",
        help="stop measuring after about this many seconds",
    )
    limits.add_argument("--threads", type=int, default=2, metavar="N", help="number of CPU threads")
    limits.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the chosen measurement, print its result, and return the exit status.

    Raises ConfigError for a wrong option or setting.
    """
    if args.measurement == "transformers":
        require_packages("bench transformers", "transformers", "transformers")
    for name, bounds in _BOUNDS.items():
        if name in args:
            bounds.check(option_name(name), getattr(args, name))
    config = make_config(args)  # reports a wrong setting before torch is imported
    options = {"steps": args.steps, "seconds": args.seconds}
    if args.measurement == "transformers":
        options |= {"compile": args.compile, "by_layer": args.by_layer}
    if args.measurement == "train":
        options |= {"peak_seconds": args.peak_seconds, "profile": args.profile, "out": args.out}
    with ProgressLines().never_silent() as progress:
        progress.line(f"loading torch to measure {_summary_of(config_to_tables(config))}")
        device = _device(args, config)
        module = importlib.import_module(f"bert_tools.bench.{args.measurement}")
        states_mode = args.config or any(each.startswith("run.step_mode") for each in args.set)
        if args.measurement == "transformers" and device.type == "cuda" and not states_mode:
            config = replace(config, run=replace(config.run, step_mode="captured"))
        result = module.measure(config, device, progress, **options)
    print(json.dumps(result) if args.json else "\n".join(lines_of(result)))
    return 0


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Format the JSON object of a measurement as text, one line per key.

    The config is summarized in one line. Values that are None are omitted, except a loss, which is
    shown as not finite.
    """
    lines = []
    for name, value in result.items():
        if name == "config":
            lines.append(f"{name:28} {_summary_of(value)}")
        elif isinstance(value, dict):
            lines += [f"{name}:", *(f"  {line}" for line in lines_of(value))]
        elif isinstance(value, list) and isinstance(value[0], dict):
            rows = [[_shown(cell) for cell in row.values()] for row in value]
            lines += aligned(list(value[0]), rows, left="name,rule,updater")
        elif name == "loss" and value is None:
            lines.append(f"{name:28} not finite")
        elif value is not None:
            lines.append(f"{name:28} {_shown(value)}")
    return lines


def _shown(value: Any) -> str:
    """Format a value for a line of text.

    Floats below 1,000 have four significant digits, and larger numbers have thousands separators.
    The values of a list are joined with " .. ", and text is unchanged.
    """
    if isinstance(value, list):
        return " .. ".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _summary_of(config: Mapping[str, Any]) -> str:
    """Summarize in one line those settings of a config that affect speed most."""
    model, parallel = config["model"], config["parallel"]
    return (
        f"{model['architecture']}, {model['num_layers']} layers, hidden {model['hidden_size']}, "
        f"{model['num_heads']} heads, feed-forward {model['intermediate_size']}, "
        f"{model['precision']}, dropout {model['hidden_dropout']:g}, batch "
        f"{parallel['local_batch_size']} x {parallel['grad_accum_steps']}, "
        f"step {config['run']['step_mode']}"
    )


def make_config(args: argparse.Namespace) -> RunConfig:
    """Return the config to measure on one rank, which is --config or bench.toml, changed by --set.

    A random seed is replaced with 1, so that measurements are repeatable. Raises ConfigError for a
    setting that does not work.
    """
    if args.config:
        one_rank = ("parallel.nodes=1", "parallel.ranks_per_node=1")
        config = load_config(args.config, [*args.set, *one_rank])
    else:
        model = OPTIMIZER_MODEL if args.measurement == "optimizer" else ()
        config = load_config(BASE, [*model, *args.set])
    if config.run.seed == "random":
        config = replace(config, run=replace(config.run, seed=1))
    return config


def _device(args: argparse.Namespace, config: RunConfig) -> "torch.device":
    """Set torch's number of CPU threads, and return the device that the config selects."""
    import torch

    from mlperf_bert.distributed.launch import choose_device, read_rank_info

    torch.set_num_threads(args.threads)
    return choose_device(config.run.device, read_rank_info())
