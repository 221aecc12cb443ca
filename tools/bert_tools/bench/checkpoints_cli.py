"""The measurement `bench checkpoints`: arguments and what they call; torch waits until it runs."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from bert_tools.bench.run_options import add_run_arguments, make_config
from mlperf_bert.common.errors import ConfigError

# The model where there is no config and no option says another.
DEFAULTS = {"layers": 4, "hidden": 256, "max_length": 128, "batch": 8}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench checkpoints`."""
    add_run_arguments(parser)
    parser.add_argument(
        "--pairs", type=int, default=10, metavar="N", help="pairs of blocks (default 10)"
    )
    parser.add_argument(
        "--steps", type=int, default=200, metavar="N", help="of a block (default 200)"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="on the disk to write to; is emptied again (default: a temporary directory)",
    )
    parser.set_defaults(measure=measure, seconds=1.0)  # no limit of time: `steps` says how long


def measure(args: argparse.Namespace) -> int:
    """Run `bench checkpoints`. Raises ConfigError for what the user can mend."""
    if args.pairs < 1:
        raise ConfigError("--pairs", f"is {args.pairs}", "set it to 1 at least")
    if args.config is None:
        for name, value in DEFAULTS.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
    config = make_config(args)
    import torch

    from bert_tools.bench.checkpoints import in_words, measure_checkpoints
    from mlperf_bert.distributed.binding import choose_device
    from mlperf_bert.distributed.launch import read_rank_info

    torch.set_num_threads(args.threads)
    device = choose_device(args.device, read_rank_info())
    with _own_directory(args.directory) as directory:
        result = measure_checkpoints(
            config,
            device,
            Path(directory),
            pairs=args.pairs,
            steps=args.steps,
            report=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print(json.dumps(result) if args.json else in_words(result))
    return 0


def _own_directory(parent: Path | None) -> tempfile.TemporaryDirectory[str]:
    """A directory that goes away again, below `parent` where it is given."""
    try:
        return tempfile.TemporaryDirectory(prefix="mlperf_bert-bench-", dir=parent)
    except OSError as error:
        problem = f"{error.strerror}: {parent}"
        raise ConfigError("--directory", problem, "name one that can be written") from None
