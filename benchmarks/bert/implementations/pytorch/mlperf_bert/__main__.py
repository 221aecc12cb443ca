"""The command line `mlperf_bert <command>`, which `python -P -m mlperf_bert <command>` also starts.

Only the module of the requested command is loaded, and large modules are imported when the command
runs.
"""

import argparse
import errno
import importlib
import importlib.metadata
import importlib.util
import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import NoReturn

from mlperf_bert import git_commit, package_version
from mlperf_bert.arguments import PROGRAM, Parser
from mlperf_bert.compiled import (
    keep_this_directory_from_children,
    remove_temporary,
    set_code_caches,
)
from mlperf_bert.distributed.launch import is_silent_rank
from mlperf_bert.distributed.signal_watch import (
    Ended,
    EndingInOrder,
    end_with_script,
    unblock_ctrl_c,
)
from mlperf_bert.errors import (
    FAULT,
    INTERRUPTED,
    MISTAKE,
    NOBODY_READS,
    STOPPED,
    ConfigError,
    UserError,
    is_out_of_memory,
    one_line,
    say,
    say_error,
)

_MAKE_ROOM = "free some space on that disk, or write to another disk"
_CHECK_ACCESS = "check its permissions, or use another path"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _MAKE_ROOM),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _CHECK_ACCESS),
    errno.ENAMETOOLONG: "use a shorter path",
}
_SMALLER = "use a smaller batch or model"
_LESS_MEMORY = {"prepare": "split the text into more files, or use fewer workers (--workers)"}
DEBUG = "--debug"  # removed before parsing, so that it works in any position
# Each command's module, which has `add_arguments` and `run`, and its line in --help. The submission
# works without the package of the tools. Commands that are not installed are not listed.
COMMANDS = {
    "train": ("mlperf_bert.cli.train", "train until the model reaches its target accuracy"),
    "pretrain": ("bert_tools.pretrain.cli", "train an encoder on your own text and export it"),
    "phases": ("bert_tools.phases.cli", "train in several phases, for example short texts first"),
    "watch": ("bert_tools.report.watch", "show the progress of runs in the terminal"),
    "evaluate": ("mlperf_bert.cli.evaluate", "measure a checkpoint's accuracy on held-out data"),
    "convert": ("bert_tools.convert.cli", "convert another program's weights to a checkpoint"),
    "export": ("bert_tools.huggingface.export", "write a checkpoint for Hugging Face transformers"),
    "fill": ("bert_tools.huggingface.fill", "print the words a checkpoint predicts for [MASK]"),
    "score": ("bert_tools.score.cli", "score an encoder on your own labelled texts"),
    "prepare": ("mlperf_bert.prepare.cli", "convert text to training data"),
    "verify": ("mlperf_bert.cli.verify", "check that prepared data are complete and intact"),
    "network-test": (
        "mlperf_bert.cli.network_test",
        "check and time an all-reduce over all ranks",
    ),
    "config": ("mlperf_bert.cli.config", "list all settings, and check or print a config"),
    "bench": ("bert_tools.bench.cli", "measure training speed on this machine"),
    "plan": ("bert_tools.plan.cli", "write a config for your GPUs, or predict balance and time"),
    "tune": ("bert_tools.tune.cli", "search hyper-parameters with many short runs"),
    "squad": ("bert_tools.squad.cli", "fine-tune on SQuAD and compare training engines"),
    "doctor": ("bert_tools.doctor.cli", "check that this machine can train"),
    "report": ("bert_tools.report.cli", "write a report page or TensorBoard scalars of runs"),
    "system": (
        "bert_tools.package.system",
        "measure this machine for a system description",
    ),
    "package": ("bert_tools.package.cli", "build, check and score an MLPerf submission"),
}

# Options that select another module for a command.
VARIANTS = {
    ("prepare", "--corpus"): "bert_tools.pretrain.corpus",
    ("train", "--rehearse"): "bert_tools.rehearse.cli",
}


def entry() -> NoReturn:
    """Run the command given on the command line, and exit with its status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # one-byte locales lack most characters
            stream.reconfigure(errors="backslashreplace")
    try:
        keep_this_directory_from_children()
        end_with_script()
        with EndingInOrder():
            status = main()
    except SystemExit as leaving:  # the parser has printed the reason
        status = leaving.code if isinstance(leaving.code, int) else FAULT
    except BrokenPipeError:  # a reader such as `head` has closed the pipe
        status = NOBODY_READS
    except Exception:  # a bug, printed here because ranks exit in `_leave`
        status = FAULT
        with suppress(OSError):
            # One write, so that the tracebacks of several ranks do not mix.
            sys.stderr.write(traceback.format_exc())
    _leave(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    If the user made a mistake or a disk is full, the function prints one line on stderr and returns
    an error status, normally 2.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        unblock_ctrl_c()
        asked = [word for word in words if word != DEBUG]
        if asked[:1] in ([], ["--version"]):
            return _without_command(asked)
        args = make_parser(asked).parse_args(asked)
        args.command_line = words
        set_code_caches()
        return int(args.run(args))
    except UserError as error:
        if DEBUG in words:
            traceback.print_exc()
        say_error(error)
        return error.exit_status
    except Exception as error:
        line = None if DEBUG in words else _in_one_line(error, words)
        if line is None:
            raise
        say_error(line)
        return MISTAKE
    except KeyboardInterrupt as interruption:
        by = f" by {interruption}" if isinstance(interruption, Ended) else ""
        if not is_silent_rank():
            say(f"interrupted{by}")
        return STOPPED if by else INTERRUPTED


def _in_one_line(error: Exception, words: Sequence[str]) -> str | None:
    """Return a one-line message for an error that the user can fix, or None for a bug."""
    is_known = not isinstance(error, PermissionError) or error.filename
    if is_known and isinstance(error, OSError) and (remedy := _REMEDIES.get(error.errno or 0)):
        where = one_line(str(error.filename or "stdout or a file"))
        return f"{where}: {error.strerror}; {remedy}"
    if isinstance(error, ImportError):
        from mlperf_bert.extras import shadowed_packages

        # The error came from a package on PYTHONPATH, or from an import of such a package.
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        for directory, name in shadowed_packages():
            within = tuple(f"{os.path.join(directory, name)}{end}" for end in (os.sep, ".py"))
            is_theirs = (error.name or "").partition(".")[0] == name
            if is_theirs or any(file.startswith(within) for file in files[-3:]):
                problem = f"Python imports {name} from {directory} ({one_line(str(error))})"
                return f"PYTHONPATH: {problem}; unset PYTHONPATH"
        return None
    if is_out_of_memory(error):
        part = " ".join(takewhile(lambda word: not word.startswith("-"), words[:2]))
        problem = one_line(str(error).partition("\n")[0])
        return f"{part}: out of memory ({problem}); {_LESS_MEMORY.get(part, _SMALLER)}"
    return None


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands.

    Only the command that occurs in `words`, the command line, gets its arguments, because the
    modules of other commands are not loaded.
    """
    parser = Parser(
        prog=PROGRAM,
        description="Pre-train BERT as an MLPerf benchmark, or on your own text. "
        "`mlperf_bert COMMAND --help` explains a command and shows an example.",
        epilog=f"Add {DEBUG} to any command to see the traceback of an error.",
    )
    parser.add_argument("--version", action="store_true", help="print the program's version")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    asked = next((word for word in words if not word.startswith("-")), None)
    has_tools = importlib.util.find_spec("bert_tools") is not None
    for name, (module_name, text) in COMMANDS.items():
        for (command_name, option), variant in VARIANTS.items():
            if name == command_name and any(word.partition("=")[0] == option for word in words):
                module_name = variant
        is_there = has_tools or not module_name.startswith("bert_tools.")
        if is_there:
            command = commands.add_parser(name, help=text)
        if name == asked:
            if not is_there:
                remedy = "run this command in a checkout of the whole repository"
                raise ConfigError(name, "belongs to the tools, which are not installed", remedy)
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _without_command(asked: Sequence[str]) -> int:
    """Print the help, or the versions of the program and torch if `asked` is `--version`.

    Returns the exit status.
    """
    if not asked:
        make_parser(asked).print_help(sys.stderr)
        return MISTAKE
    commit = f" (commit {found})" if (found := git_commit()) else ""
    torch = importlib.metadata.version("torch")  # without importing torch
    print(f"mlperf_bert {package_version()}{commit}, torch {torch}")
    return 0


def _leave(status: int) -> NoReturn:
    """Exit with `status`, or with another status if stdout could not be written.

    The exit status of a training rank tells how the training ended, so a failed write does not
    change it. For other commands, the output is the result, so a failed write is an error.
    """
    is_rank = "mlperf_bert.distributed.session" in sys.modules
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed at the start
        try:
            stream.flush()
        except OSError as error:
            # Otherwise the interpreter tries to flush again when it ends, and exits with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if stream is sys.stderr or status == MISTAKE or "train" in sys.argv[1:3]:
                continue
            if not isinstance(error, BrokenPipeError):
                say_error(f"stdout: {error.strerror}; write to another file or disk")
                status = MISTAKE
            elif not is_rank:
                status = NOBODY_READS
    if is_rank:
        # DistributedDataParallel keeps its process group and gloo's threads until the interpreter
        # ends (torch 2.13), and stopping them there once aborted a test run. After an error NCCL's
        # threads still run too.
        remove_temporary()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    entry()
