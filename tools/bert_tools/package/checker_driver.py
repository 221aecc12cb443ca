"""Runs MLCommons' checkers, each in a forked child of one process that has loaded them.

A separate script, started by `checkers.py`, as a checker takes seconds to import and a tenth of one
to run. The child runs it as `python -m mlperf_logging.<checker>` would.

It reads from stdin a list of {"module", "arguments", "output"} and writes a list of exit statuses
to stdout. A checker's output goes to the file `output`.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import traceback

PRELOADED = "mlperf_logging.package_checker.package_checker"  # imports all others
LIMIT_S = 300  # a checker takes seconds; one that hangs is ended by the alarm


def main() -> None:
    """Run all commands from stdin, one after the other."""
    commands = json.load(sys.stdin)
    importlib.import_module(PRELOADED)
    statuses = []
    for command in commands:
        child = os.fork()
        if child == 0:
            _run_child(command["module"], command["arguments"], command["output"])
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    json.dump(statuses, sys.stdout)


def _run_child(module: str, arguments: list[str], output: str) -> None:
    """Become the checker; never returns."""
    status = 1
    try:
        signal.alarm(LIMIT_S)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.dup2(descriptor, sys.stdout.fileno())
        os.dup2(descriptor, sys.stderr.fileno())
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
