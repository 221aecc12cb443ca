"""`squad train`: one fine-tuning run by one engine, on ranks that it starts itself if need be."""

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bert_tools.squad.options import (
    VOCABULARY,
    DataOptions,
    add_data,
    add_settings,
    data_options,
    random_model,
    settings_of,
)
from mlperf_bert.common.errors import STOPPED, ConfigError

if TYPE_CHECKING:
    import torch

    from bert_tools.squad.inputs import SquadInputs
    from bert_tools.squad.settings import SquadSettings
    from mlperf_bert.distributed.launch import RankInfo
    from mlperf_bert.signals.whereabouts import Whereabouts

_MOST_SEED = 2**31 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `squad train`."""
    parser.add_argument(
        "--engine",
        default="single",
        metavar="NAME",
        help="single, ddp:N, fsdp:N, pipeline:S or pipeline:Sxddp:R, pipelines with @schedule "
        "(default single)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="where record and model go (default: runs/<utc>-squad)",
    )
    parser.add_argument(
        "--save",
        choices=("weights", "nothing"),
        default="weights",
        help="the fine-tuned model beside the record (default), or the record alone",
    )
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    add_data(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Train; 0, or 75 where a signal ended the run. Raises UserError."""
    from bert_tools.squad.ranks import default_ranks
    from bert_tools.squad.settings import parse_engine
    from mlperf_bert.distributed.launch import read_rank_info
    from mlperf_bert.distributed.session import from_rank_zero, in_session, on_rank_zero
    from mlperf_bert.distributed.spawn import run_on_ranks
    from mlperf_bert.run.lock import RunLock
    from mlperf_bert.signals.signal_watch import SignalWatch
    from mlperf_bert.signals.whereabouts import Whereabouts

    if not 0 <= args.seed <= _MOST_SEED:
        raise ConfigError("--seed", f"is {args.seed}", f"give 0 .. {_MOST_SEED}")
    engine = parse_engine(args.engine, args.schedule, default_ranks())
    settings, data = settings_of(args, engine, args.seed), data_options(args)
    info = read_rank_info()
    if info.launcher == "single" and engine.ranks > 1:
        return run_on_ranks(args.command_line, engine.ranks)
    whereabouts = Whereabouts()
    run_dir = args.run_dir or _default_directory()  # holds the time: rank 0's counts
    lock = RunLock(run_dir if info.rank == 0 else None, "squad")

    def run_rank(info: "RankInfo", device: "torch.device") -> int:
        on_rank_zero(info, lock.check)
        own_dir = Path(from_rank_zero(info, str(run_dir)))
        return _run_rank(args, settings, data, own_dir, info, device, whereabouts)

    device: Literal["auto", "cpu", "cuda"] = args.device
    with lock, SignalWatch(whereabouts, speaks=info.rank == 0):
        return in_session(run_rank, device, "refuse", whereabouts=whereabouts)


def _run_rank(
    args: argparse.Namespace,
    settings: "SquadSettings",
    data: DataOptions,
    run_dir: Path,
    info: "RankInfo",
    device: "torch.device",
    whereabouts: "Whereabouts",
) -> int:
    from bert_tools.squad.fine_tune import check_free, fine_tune
    from bert_tools.squad.quick_vocabulary import write_vocabulary
    from mlperf_bert.distributed.session import on_rank_zero

    path = data.vocabulary or run_dir / VOCABULARY
    if data.vocabulary is None and data.init_checkpoint is None:
        on_rank_zero(info, lambda: check_free(run_dir, args.save))
        on_rank_zero(info, lambda: write_vocabulary(data.train, path))
    inputs = _inputs(data, path, settings.max_length)
    record = fine_tune(
        settings, inputs, run_dir, info, device, save=args.save, whereabouts=whereabouts
    )
    if record is None:
        return STOPPED
    if info.rank == 0 and not args.quiet:
        print(in_words(record))
        if args.save == "weights":
            model = shlex.quote(str(run_dir / "model"))
            print(f"to answer with it: mlperf_bert squad evaluate --model {model} --dev FILE")
    return 0


def _inputs(data: DataOptions, vocabulary: Path, max_length: int) -> "SquadInputs":
    from bert_tools.squad.inputs import SquadInputs
    from mlperf_bert.vocabulary.any_vocabulary import load_any_vocabulary

    if data.init_checkpoint is not None:
        return SquadInputs(
            train=data.train,
            dev=data.dev,
            vocabulary=data.vocabulary,
            init_checkpoint=data.init_checkpoint,
        )
    num_tokens = len(load_any_vocabulary(vocabulary))
    return SquadInputs(
        train=data.train,
        dev=data.dev,
        vocabulary=vocabulary,
        model=random_model(data, num_tokens, max_length),
    )


def _default_directory() -> Path:
    return Path("runs") / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-squad"


def in_words(record: dict[str, Any]) -> str:
    """The result for people."""
    seconds, rates, data = record["seconds"], record["samples_per_s"], record["data"]
    return (
        f"{record['engine']}: {record['updates']:,} updates, {record['samples']:,} samples in "
        f"{seconds['train']:.1f} s of training, {rates['train']:.1f} samples/s; validation loss "
        f"{record['validation_loss']:.4f}, of {data['dev_questions']:,} questions exact match "
        f"{record['exact_match']:.2f} %, F1 {record['f1']:.2f} %"
    )
