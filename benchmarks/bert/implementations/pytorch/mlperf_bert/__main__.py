"""The command line: `mlperf_bert <command>`, the same as `python -m mlperf_bert <command>`.

Only the module of the command that was asked for is loaded, and what is heavy when that runs.
"""

import argparse
import errno
import importlib
import importlib.util
import os
import select
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import NoReturn, TextIO

from mlperf_bert import package_version
from mlperf_bert.common.code_caches import remove_temporary, set_code_caches
from mlperf_bert.common.errors import (
    FAULT,
    INTERRUPTED,
    MISTAKE,
    NOBODY_READS,
    STOPPED,
    ConfigError,
    UserError,
    one_line,
    say,
    say_error,
)
from mlperf_bert.config.options import check_paths
from mlperf_bert.signals.signal_watch import Ended, EndingInOrder, end_with_script

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DEBUG = "--debug"  # taken out before the rest is parsed, so that it may stand anywhere
# Name: the module with `add_arguments` and `run`, and what --help says. The submission is whole
# without the package of the tools: what is not installed is not offered.
COMMANDS = {
    "train": ("mlperf_bert.cli.train", "train until the target accuracy"),
    "watch": (
        "bert_tools.report.watch",
        "a running job's curves, rates and alerts in the terminal",
    ),
    "evaluate": ("mlperf_bert.cli.evaluate", "accuracy of a checkpoint"),
    "convert": ("bert_tools.convert.convert_cli", "weights of other programs to a checkpoint"),
    "export": ("mlperf_bert.cli.export", "a checkpoint to what other programs load"),
    "fill": ("mlperf_bert.cli.fill", "what a checkpoint puts in the place of [MASK]"),
    "prepare": ("mlperf_bert.prepare.cli", "text to shards, sidecars and index"),
    "verify": ("mlperf_bert.prepare.verify.report", "whether prepared data is whole and right"),
    "stage-data": (
        "mlperf_bert.cli.stage_data",
        "copy a node's part of the data to local disk",
    ),
    "network-test": ("mlperf_bert.cli.network_test", "whether the ranks of a job reach each other"),
    "config": ("mlperf_bert.cli.config", "check a config and print it complete"),
    "bench": ("bert_tools.bench.cli", "measure this software on this machine"),
    "plan": ("bert_tools.plan.cli", "answers before a run: how even ranks' work is"),
    "tune": ("bert_tools.tune.cli", "search hyper-parameters by many short trainings"),
    "squad": ("bert_tools.squad.cli", "fine-tune on questions; engines side by side"),
    "system": ("bert_tools.package.system_cli", "describe this machine as MLPerf wants it"),
    "doctor": ("bert_tools.doctor.cli", "whether this machine, or these ranks, can train"),
    "report": (
        "bert_tools.report.cli",
        "runs as a page to look at, or whether one is on track",
    ),
    "package": ("bert_tools.package.cli", "a submission directory, checked, and its score"),
}


def entry() -> NoReturn:
    """The program: run the command line's command and leave with its status."""
    try:
        end_with_script()
        with EndingInOrder():
            status = main()
    except SystemExit as leaving:  # argparse, which has said why
        status = leaving.code if isinstance(leaving.code, int) else FAULT
    except Exception as error:  # a fault of ours: told here, because a rank does not come further
        status = _tell_fault(error)
    _leave(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake, or a full disk, is one line on stderr and status 2."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        asked = [word for word in words if word != DEBUG]
        args = _parser(asked).parse_args(asked)
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


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Of all commands, with the arguments of the one that `words` ask for."""
    parser = argparse.ArgumentParser(
        prog="mlperf_bert",
        description="BERT pre-training, MLPerf style",
        epilog=f"{DEBUG} after any command shows the traceback of an error as well",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {package_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    asked = next((word for word in words if not word.startswith("-")), None)
    has_tools = importlib.util.find_spec("bert_tools") is not None
    for name, (module_name, text) in COMMANDS.items():
        is_there = has_tools or not module_name.startswith("bert_tools.")
        if is_there:
            command = commands.add_parser(name, help=text)
        if name == asked:
            if not is_there:
                remedy = "run it in a checkout of the whole repository"
                raise ConfigError(name, "is one of the tools, which are not installed", remedy)
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _leave(status: int) -> NoReturn:
    """End the process with `status`, or with that of output which cannot be written."""
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


def _tell_fault(error: Exception) -> int:
    """Show the traceback of the exception at hand; the status to leave with."""
    if _is_gone(error) and _is_unread(sys.stdout):
        return NOBODY_READS
    with suppress(OSError):
        sys.stderr.write(traceback.format_exc())  # one write: ranks may say it at once
    return FAULT


def _is_out_of_memory(error: Exception) -> bool:
    """Whether it is Python's, or torch's, which need not be imported; on a CPU that has no kind."""
    torch = sys.modules.get("torch")
    is_gpus = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return is_gpus or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


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


if __name__ == "__main__":
    entry()
