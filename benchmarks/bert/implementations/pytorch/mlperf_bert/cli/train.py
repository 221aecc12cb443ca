"""The sub-command `train`, which starts the ranks of a run, or runs one rank or its reader.

A reader is a process that reads samples for a rank.
"""

import argparse
import secrets
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.arguments import describe
from mlperf_bert.config.files import add_config, add_init_checkpoint, load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.signal_watch import Ended, say_stopped_early, write_status
from mlperf_bert.errors import STOPPED, TARGET_MISSED, ConfigError
from mlperf_bert.extras import require_packages

if TYPE_CHECKING:
    import torch

    from mlperf_bert.checkpoint.resume import Start
    from mlperf_bert.distributed.launch import RankInfo
    from mlperf_bert.distributed.reader_roles import MpiProcess
    from mlperf_bert.distributed.signal_watch import Whereabouts
    from mlperf_bert.run.console import ProgressLines
    from mlperf_bert.run.directory import RunDirectory
    from mlperf_bert.run.hints import Hints
    from mlperf_bert.run.lock import RunLock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train` to its parser."""
    describe(
        parser,
        "Train until the model reaches the target accuracy of the config. The command reads "
        "prepared data, and writes metrics, an MLPerf log and checkpoints to the run's directory. "
        "Without a launcher such as SLURM or torchrun, it starts the ranks of one node itself. To "
        "check a large run without its cluster, see `train --rehearse RANK --help`.",
        "mlperf_bert train --config cpu_tiny --data my_data --set run.max_steps=500",
    )
    trained = parser.add_argument_group("what to train")
    add_config(trained)
    text = "directory with the prepared sets train/ and eval/"
    trained.add_argument("--data", type=Path, required=True, metavar="DIR", help=text)
    add_init_checkpoint(trained)
    results = parser.add_argument_group("where results go, and what to resume")
    results.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="directory for the results (default: runs/<utc>-<config>)",
    )
    text = "write the results to the subdirectory run_N of --run-dir"
    results.add_argument("--run-index", type=int, default=0, metavar="N", help=text)
    results.add_argument(
        "--resume",
        metavar="auto|none|DIR",
        default="none",
        help="'none' starts a new run, 'auto' resumes the run in --run-dir or starts it if there "
        "is none, and DIR resumes from the checkpoint in this directory",
    )
    launched = parser.add_argument_group("for scripts that launch ranks")
    launched.add_argument(
        "--cache-cleared",
        action="store_true",
        help="write to the MLPerf log that the page cache was dropped before the run",
    )
    launched.add_argument(
        "--status-file",
        type=Path,
        metavar="FILE",
        help="write status 3 or 75 to this file and exit with 0, because launchers kill the other "
        "ranks if one rank exits with a nonzero status",
    )
    # With the first two, run_and_time.sh and `pretrain` say what to type to continue their run, or
    # to start a new one. run_and_time.sh prints the hint itself if a run stops before the first
    # step, because it can do so even before Python handles signals.
    launched.add_argument("--go-on-by", metavar="COMMAND", help=argparse.SUPPRESS)
    launched.add_argument("--new-run-by", metavar="OPTIONS", help=argparse.SUPPRESS)
    launched.add_argument("--no-start-hint", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Train, and return the exit status.

    The status is 0 if the run reached its target or ended without a target, 3 if it missed the
    target, and 75 if a signal stopped it.
    """
    args.run_dir_given = args.run_dir is not None
    args.run_dir = args.run_dir or _default_root(args.config)
    try:
        return _run(args)
    except KeyboardInterrupt as interruption:  # before ranks or this rank watched for signals
        from mlperf_bert.distributed.launch import read_rank_info

        if (info := read_rank_info()).rank == 0:
            name = str(interruption) if isinstance(interruption, Ended) else "SIGINT"
            say_stopped_early(name, _start_hint(args, info))
        return STOPPED


def _run(args: argparse.Namespace) -> int:
    """Start the ranks of the run, or train as one of them. Returns the exit status."""
    from mlperf_bert.checkpoint.first_weights import check_first_weights
    from mlperf_bert.distributed.launch import read_rank_info
    from mlperf_bert.distributed.spawn import run_on_ranks
    from mlperf_bert.run.lock import RunLock

    if args.run_index < 0:
        raise ConfigError("--run-index", f"must be at least 0, not {args.run_index}", "")
    config = load_config(args.config, args.set, args.init_checkpoint)
    if config.data.loader == "mpi_readers":
        return _train_with_readers(args, config)
    info = read_rank_info()
    parallel, is_single = config.parallel, info.launcher == "single"
    if is_single and config.data.loader == "dali":
        require_packages("data.loader", "dali", "nvidia.dali")  # now, because ranks must not ask
    if is_single and args.resume == "none":
        check_first_weights(config, args.data)  # now, because loading torch takes a while
    if is_single and parallel.nodes == 1 < parallel.ranks_per_node:
        if args.resume == "auto":
            _check_run_dir(args)
        with RunLock(args.run_dir, f"run_{args.run_index}") as lock:  # until the ranks end
            lock.check()
            return run_on_ranks(
                [*args.command_line, "--run-dir", str(args.run_dir)],
                parallel.ranks_per_node,
                agreed_statuses=(STOPPED, TARGET_MISSED),
                hint=_start_hint(args, info),
            )
    return _train_as_rank(args, config)


def _train_with_readers(args: argparse.Namespace, config: RunConfig) -> int:
    from mlperf_bert.data.make_loader import run_reader
    from mlperf_bert.distributed.launch import read_rank_info
    from mlperf_bert.distributed.reader_roles import mpi_process

    with mpi_process(read_rank_info()) as process:
        if process.role.is_reader:
            run_reader(config, args.data, process)
            return 0
        return _train_as_rank(args, config, process)


def _train_as_rank(
    args: argparse.Namespace, config: RunConfig, process: "MpiProcess | None" = None
) -> int:
    """Train as one rank, and return its exit status. Only rank 0 locks the run's directory."""
    from mlperf_bert.distributed.launch import read_rank_info
    from mlperf_bert.run.lock import RunLock

    info = process.role.info if process else read_rank_info()
    root = args.run_dir  # the default has the time in it, so rank 0's name is used
    # Ranks that this program started leave the directory to the process that started them.
    is_owner = info.rank == 0 and info.launcher != "local"
    with RunLock(root if is_owner else None, f"run_{args.run_index}") as lock:
        return _train_in(root, lock, info, args, config, process)


def _default_root(config_path: Path) -> Path:
    """Return the default run directory, `runs/<utc>-<config>` in the current directory."""
    utc = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return Path("runs") / f"{utc}-{config_path.stem}"


def _check_run_dir(args: argparse.Namespace) -> None:
    if not args.run_dir_given:
        remedy = "pass the directory of the run to resume"
        raise ConfigError("--run-dir", "is missing, but --resume auto requires it", remedy)


def _train_in(
    root: Path,
    lock: "RunLock",
    own_info: "RankInfo",
    args: argparse.Namespace,
    config: RunConfig,
    process: "MpiProcess | None",
) -> int:
    from mlperf_bert.distributed.signal_watch import SignalWatch, Whereabouts
    from mlperf_bert.run.console import ProgressLines

    whereabouts = Whereabouts()
    # Progress lines start before torch is loaded, because loading it from a cold disk takes long.
    shown = ProgressLines(stderr=False, speaks=own_info.rank == 0)
    shown.never_silent(lambda: whereabouts.in_words)
    watch = SignalWatch(
        whereabouts,
        speaks=own_info.rank == 0,
        status_file=args.status_file,
        hint=_start_hint(args, own_info),
    )
    with shown, watch:
        return _train_watched(root, lock, own_info, args, config, process, whereabouts, shown)


def _train_watched(
    root: Path,
    lock: "RunLock",
    own_info: "RankInfo",
    args: argparse.Namespace,
    config: RunConfig,
    process: "MpiProcess | None",
    whereabouts: "Whereabouts",
    shown: "ProgressLines",
) -> int:
    """Load torch, join the other ranks and train. Returns the exit status.

    Loading torch from a cold disk takes a long time, so the caller has already started to print
    progress lines.
    """
    from mlperf_bert.checkpoint.resume import with_first_weights
    from mlperf_bert.data.make_loader import dismiss_reader
    from mlperf_bert.distributed.session import from_rank_zero, in_session
    from mlperf_bert.run.directory import RunDirectory
    from mlperf_bert.seeds import SEED_BITS
    from mlperf_bert.train import train

    def run_rank(info: "RankInfo", device: "torch.device") -> int:
        directory = RunDirectory(Path(from_rank_zero(info, str(root))), args.run_index)
        start = _agree_on_start(args, directory, config, info, lock)
        if start.ended is not None:
            if process is not None:
                dismiss_reader(process)
            return _leave(args, info, start.ended.status == "success", stopped_by=None)
        seed = start.seed
        if seed is None:
            drawn, wanted = secrets.randbits(SEED_BITS), config.run.seed
            seed = from_rank_zero(info, drawn if wanted == "random" else wanted)
        outcome = train(
            with_first_weights(config, start),
            info,
            device,
            directory,
            args.data,
            seed,
            start=start,
            process=process,
            cache_cleared=args.cache_cleared,
            whereabouts=whereabouts,
            shown=shown,
            hints=_hints(args, own_info),
        )
        return _leave(args, info, outcome.status == "success", outcome.stopped_by)

    patience = timedelta(seconds=config.run.hang_timeout_s)
    return in_session(
        run_rank, config.run.device, config.parallel.share_gpu, own_info, patience, whereabouts
    )


def _start_hint(args: argparse.Namespace, info: "RankInfo") -> str | None:
    """Return what to type if the run stops before its first step, or None on ranks other than 0."""
    if args.no_start_hint or info.rank != 0:
        return None
    return _hints(args, info).before_first_step()


def _hints(args: argparse.Namespace, info: "RankInfo") -> "Hints":
    from mlperf_bert.run.hints import Hints
    from mlperf_bert.run.paths import RunPaths

    return Hints(
        paths=RunPaths(args.run_dir, args.run_index),
        config=args.config,
        data=args.data,
        settings=args.set,
        init_checkpoint=args.init_checkpoint,
        resume=args.resume,
        is_alone=info.launcher in ("single", "local"),
        script_command=args.go_on_by,
    )


def _agree_on_start(
    args: argparse.Namespace,
    directory: "RunDirectory",
    config: RunConfig,
    info: "RankInfo",
    lock: "RunLock",
) -> "Start":
    """Return where the run starts. Rank 0 decides this after it has locked the run's directory.

    All ranks must call this function.
    """
    from mlperf_bert.checkpoint.first_weights import check_first_weights
    from mlperf_bert.checkpoint.manifest import LATEST, read_latest
    from mlperf_bert.checkpoint.resume import NEW_RUN, Start, find_start
    from mlperf_bert.distributed.session import from_rank_zero, on_rank_zero
    from mlperf_bert.files import is_there, names_in, write_file

    found = [NEW_RUN]

    def find() -> None:
        lock.check()
        directory.refuse_links()
        if args.resume == "auto":
            _check_run_dir(args)
            names = names_in(directory.root)
            if not any(name.startswith("run_") and name[4:].isdigit() for name in names):
                print(f"no earlier run in {directory.root}; starting a new one", flush=True)
        found[0] = find_start(args.resume, directory, config, args.new_run_by)
        ended = found[0].ended
        if ended is None and found[0].checkpoint is None:
            remarks = (*found[0].remarks, *check_first_weights(config, args.data))
            found[0] = replace(found[0], remarks=remarks)
        if ended is not None:
            if not is_there(directory.outcome):  # it was killed right after its last checkpoint
                last, latest = found[0].checkpoint, directory.checkpoints / LATEST
                if last is not None and read_latest(latest) != last.name:
                    write_file(latest, f"{last.name}\n".encode())
                write_file(directory.outcome, ended.to_json())
            line = f"run {directory.index} of {directory.root} has already ended, "
            line += f"after {ended.steps:,} steps"
            if found[0].step < ended.steps:
                line += ". Its final weights were not saved. To get them, start a new run with "
                line += "--resume CHECKPOINT"
            print(line, flush=True)

    on_rank_zero(info, find)
    return Start.from_plain(from_rank_zero(info, found[0].to_plain()))


def _leave(
    args: argparse.Namespace, info: "RankInfo", reached: bool, stopped_by: str | None
) -> int:
    """Return this rank's exit status, which is 0 if `--status-file` stores the run's status."""
    missed = STOPPED if stopped_by else TARGET_MISSED
    status = 0 if reached else missed
    if args.status_file is None:
        return status
    if info.rank == 0 and not write_status(args.status_file, status):
        return status
    return 0
