"""The command line: `mlperf_bert <command>`, the same as `python -m mlperf_bert <command>`.

Heavy imports happen inside the command that needs them.
"""

import argparse
import errno
import os
import select
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

from bert_tools.bench import cli as bench_cli
from bert_tools.convert import convert_cli
from bert_tools.doctor import cli as doctor_cli
from bert_tools.package import cli as package_cli
from bert_tools.package import system_cli
from bert_tools.plan import cli as plan_cli
from bert_tools.report import cli as report_cli
from bert_tools.squad import cli as squad_cli
from bert_tools.tune import cli as tune_cli
from bert_tools.watch import cli as watch_cli
from mlperf_bert.cli import config as config_cli
from mlperf_bert.cli import evaluate as evaluate_cli
from mlperf_bert.cli import export as export_cli
from mlperf_bert.cli import fill as fill_cli
from mlperf_bert.cli import train as train_cli
from mlperf_bert.common.code_caches import remove_temporary, set_code_caches
from mlperf_bert.common.errors import (
    FAULT,
    INTERRUPTED,
    MISTAKE,
    NOBODY_READS,
    STOPPED,
    UserError,
    one_line,
    say,
    say_error,
)
from mlperf_bert.config.options import add_config, check_paths
from mlperf_bert.prepare import cli as prepare_cli
from mlperf_bert.prepare.verify import cli as verify_cli
from mlperf_bert.signals.signal_watch import Ended, end_with_script, ending_in_order

DEBUG = "--debug"  # taken out before the rest is parsed, so that it may stand anywhere
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def entry() -> NoReturn:
    """The program: run the command line's command and leave with its status."""
    try:
        end_with_script()
        with ending_in_order():
            status = main()
    except SystemExit as leaving:  # argparse, which has said why
        status = leaving.code if isinstance(leaving.code, int) else FAULT
    except Exception as error:  # a fault of ours: told here, because a rank does not come further
        status = FAULT
        if _is_gone(error) and _is_unread(sys.stdout):
            status = NOBODY_READS
        else:
            with suppress(OSError):
                sys.stderr.write(traceback.format_exc())  # one write: ranks may say it at once
    flushed = _flush_stdout(speaks=status != MISTAKE)
    _flush(sys.stderr)  # or the interpreter's end tries again, and leaves with 120
    if "mlperf_bert.distributed.session" in sys.modules:
        # A rank. DistributedDataParallel keeps its process group, and with it gloo's threads, to
        # the very end (torch 2.13), where taking them down can abort: seen once in a test run;
        # and after an error NCCL's are still up. How it trained counts, not who reads of it; but
        # other commands are for what they print.
        remove_temporary()
        os._exit(MISTAKE if flushed == MISTAKE and "train" not in sys.argv[1:3] else status)
    sys.exit(flushed or status)


def _is_gone(error: Exception) -> bool:
    """Whether it may be of a pipe without a reader, or of a terminal that was closed."""
    return isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO)


def _is_unread(stream: TextIO | None) -> bool:
    """Whether what reads it has gone."""
    if stream is None:
        return False
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _flush_stdout(*, speaks: bool) -> int:
    """Write what is still to be written; 0, or the status for what has become of it."""
    error = _flush(sys.stdout)
    if error is None:
        return 0
    if _is_gone(error):
        return NOBODY_READS
    if speaks:
        say_error(f"stdout: {error.strerror or 'cannot be written'}; write to another place")
    return MISTAKE


def _flush(stream: TextIO | None) -> OSError | None:
    """Write what is still to be written; where that fails, why, and it is dropped."""
    if stream is None:  # closed from the beginning
        return None
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake, or a full disk, is one line on stderr and status 2."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        args = _parser().parse_args([word for word in words if word != DEBUG])
        args.command_line = words
        check_paths(args)
        set_code_caches()
        return int(args.run(args))
    except UserError as error:
        if DEBUG in words:
            traceback.print_exc()
        say_error(error)
        return error.exit_status
    except OSError as error:
        if DEBUG in words or error.errno not in _NO_ROOM:
            raise
        where = one_line(str(error.filename or "stdout or a file"))
        say_error(f"{where}: {error.strerror}; make room there, or write to another place")
        return MISTAKE
    except Exception as error:
        if DEBUG in words or not _is_out_of_memory(error):
            raise
        part = " ".join(takewhile(lambda word: not word.startswith("-"), words[:2]))
        problem, remedy = one_line(str(error).partition("\n")[0]), "see `mlperf_bert plan memory`"
        say_error(f"{part}: out of memory ({problem}); use a smaller batch or model, {remedy}")
        return MISTAKE
    except Ended as ended:
        say(f"interrupted by {ended}")
        return STOPPED
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def _is_out_of_memory(error: Exception) -> bool:
    """Whether it is Python's, or torch's, which need not be imported; on a CPU that has no kind."""
    torch = sys.modules.get("torch")
    is_gpus = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return is_gpus or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlperf_bert",
        description="BERT pre-training, MLPerf style",
        epilog=f"{DEBUG} after any command shows the traceback of an error as well",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add(commands, "train", train_cli, "train until the target accuracy")
    _add(commands, "watch", watch_cli, "a running job's curves, rates and alerts in the terminal")

    _add(commands, "evaluate", evaluate_cli, "accuracy of a checkpoint")
    _add(commands, "convert", convert_cli, "weights of other programs to a checkpoint")
    _add(commands, "export", export_cli, "a checkpoint to what other programs load")
    _add(commands, "fill", fill_cli, "what a checkpoint puts in the place of [MASK]")
    _add(commands, "prepare", prepare_cli, "text to shards, sidecars and index")
    _add(commands, "verify", verify_cli, "whether prepared data is whole and right")

    stage = commands.add_parser("stage-data", help="copy a node's part of the data to local disk")
    add_config(stage)
    stage.add_argument("--data", type=Path, required=True, help="directory with train/ and eval/")
    stage.add_argument("--out", type=Path, required=True, help="directory of the copy")
    stage.add_argument("--node", type=int, help="whose part, from 0 (default: the launcher's)")
    stage.add_argument("--whole", action="store_true", help="all samples, for any seed and node")
    stage.set_defaults(run=_stage_data)

    _add(commands, "config", config_cli, "check a config and print it complete")
    _add(commands, "bench", bench_cli, "measure this software on this machine")
    _add(commands, "plan", plan_cli, "answers before a run: how even ranks' work is")
    _add(commands, "tune", tune_cli, "search hyper-parameters by many short trainings")
    _add(commands, "squad", squad_cli, "fine-tune on questions; engines side by side")
    _add(commands, "system", system_cli, "describe this machine as MLPerf wants it")
    _add(commands, "doctor", doctor_cli, "whether this machine, or these ranks, can train")
    _add(commands, "report", report_cli, "runs as a page to look at, or whether one is on track")
    _add(commands, "package", package_cli, "a submission directory, checked, and its score")
    return parser


def _add(commands: Any, name: str, module: ModuleType, text: str) -> None:
    """A sub-command whose arguments and work are in a module of its own."""
    command = commands.add_parser(name, help=text)
    module.add_arguments(command)
    command.set_defaults(run=module.run)


def _stage_data(args: argparse.Namespace) -> int:
    from mlperf_bert.cli.stage_data import stage_data
    from mlperf_bert.config.files import load_config

    config = load_config(args.config, args.set)
    stage_data(config, args.data, args.out, node=args.node, whole=args.whole)
    return 0


if __name__ == "__main__":
    entry()
