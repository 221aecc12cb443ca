"""The measurements of our own step: `bench train`, `profile`, `scale` and `eval`, their arguments.

Torch waits until one of them runs.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_tools.bench.run_options import add_run_arguments, make_config
from mlperf_bert.common.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from bert_tools.bench.train import HowLong

_PEAK_SECONDS = 3.0  # long enough for clocks to fall


def add_parsers(measurements: Any) -> None:
    """Add the four measurements to the sub-commands of `bench`."""
    train = measurements.add_parser("train", help="our training step: rate, MFU, memory")
    _add_common(train, _train, steps=40, seconds=20.0)
    train.add_argument(
        "--peak-seconds",
        type=float,
        default=_PEAK_SECONDS,
        metavar="S",
        help=f"of the long run of matrix products (default {_PEAK_SECONDS:g})",
    )
    profile = measurements.add_parser("profile", help="where the time of our step goes")
    add_run_arguments(profile)
    profile.add_argument("--steps", type=int, default=3, metavar="N", help="profiled (default 3)")
    profile.add_argument("--plot", type=Path, metavar="FILE", help="a PNG timeline of one step")
    profile.set_defaults(measure=_profile, seconds=1.0)
    scale = measurements.add_parser("scale", help="rate by batch size, eager against captured")
    _add_common(scale, _scale, steps=20, seconds=2.0)
    scale.add_argument(
        "--max-batch",
        type=int,
        default=1024,
        metavar="N",
        help="sequences at most, while memory and time last (default 1024)",
    )
    scale.add_argument(
        "--sweep",
        type=int,
        metavar="B",
        help="instead: batches of B sequences, by their tokens in steps of 128",
    )
    scale.add_argument("--plot", type=Path, metavar="FILE", help="a PNG of the table")
    scale.add_argument(
        "--total-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="begin no further row after this (default 600)",
    )
    evaluation = measurements.add_parser("eval", help="evaluation, and its share of a run")
    _add_common(evaluation, _eval, steps=20, seconds=5.0)
    evaluation.add_argument(
        "--samples", type=int, default=10_000, metavar="N", help="held out (default 10000)"
    )
    evaluation.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="evaluations measured (default 3)"
    )


def _add_common(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], int],
    *,
    steps: int,
    seconds: float,
) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "--steps",
        type=int,
        default=steps,
        metavar="N",
        help=f"measured steps at most (default {steps})",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        metavar="S",
        help=f"of measured steps, about (default {seconds:g})",
    )
    parser.set_defaults(measure=measure)


def _train(args: argparse.Namespace) -> int:
    _check_positive(args, "peak_seconds")
    config = make_config(args)
    from bert_tools.bench import train

    result = train.measure_training(
        config, _device(args), _how_long(args), args.peak_seconds, _report
    )
    return _print(args, result, train.in_words)


def _profile(args: argparse.Namespace) -> int:
    config = make_config(args)
    from bert_tools.bench import profile, profile_plot, train

    result, one_step = profile.profile_training(config, _device(args), args.steps, _report)
    if args.plot:
        _write(args.plot, profile_plot.timeline(one_step, train.heading(result)))
    return _print(args, result, profile.in_words)


def _scale(args: argparse.Namespace) -> int:
    _check_positive(args, "total_seconds")
    if args.max_batch < 2:
        raise ConfigError("--max-batch", f"is {args.max_batch}", "set it to 2 at least")
    if args.sweep is not None:
        args.batch = args.sweep if args.config is None else None
        args.set += [f"parallel.local_batch_size={args.sweep}"] if args.config else []
    config = make_config(args)
    from bert_tools.bench import scale

    device = _device(args)
    limits = scale.Limits(
        of_row=_how_long(args), total_seconds=args.total_seconds, clock=time.perf_counter
    )
    if args.sweep is None:
        sizes = scale.batch_sizes(args.max_batch)
        result = scale.measure_batches(config, sizes, device, limits, _report)
    else:
        result = scale.measure_capacities(config, device, limits, _report)
    if args.plot:
        from bert_tools.bench.scale_plot import scale_picture  # its matplotlib, for a picture only

        _write(args.plot, scale_picture(result, scale.title(result)))
    return _print(args, result, scale.in_words)


def _eval(args: argparse.Namespace) -> int:
    _check_positive(args, "samples", "rounds")
    config = make_config(args)
    from bert_tools.bench import evaluation

    result = evaluation.measure_evaluation(
        config, args.samples, args.rounds, _device(args), _how_long(args), _report
    )
    return _print(args, result, evaluation.in_words)


def _device(args: argparse.Namespace) -> "torch.device":
    """The device of the options, and as many CPU threads as they say."""
    import torch

    from mlperf_bert.distributed.binding import choose_device
    from mlperf_bert.distributed.launch import read_rank_info

    torch.set_num_threads(args.threads)
    return choose_device(args.device, read_rank_info())


def _how_long(args: argparse.Namespace) -> "HowLong":
    from bert_tools.bench.train import HowLong

    return HowLong(steps=args.steps, seconds=args.seconds)


def _check_positive(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if not value > 0:
            option = "--" + name.replace("_", "-")
            raise ConfigError(option, f"is {value:g}", "set it above zero")


def _write(path: Path, picture: bytes) -> None:
    from mlperf_bert.common.atomic import write_file

    write_file(path, picture)


def _print(
    args: argparse.Namespace, result: dict[str, Any], in_words: Callable[[dict[str, Any]], str]
) -> int:
    print(json.dumps(result) if args.json else in_words(result))
    return 0


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
