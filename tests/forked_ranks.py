"""Ranks and other processes of one machine, forked from one that has imported torch.

Importing torch costs as much as most of what tests have processes do, so one process a test session
imports it and becomes all of them. A target is a script, or a module where it does not end in .py:
a test file says by `as_rank` what its ranks do, and reads by `what_ranks_saw` what they found. What
launchers do is tested with launchers (distributed/test_ranks.py).
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

# Of what most processes need; DistributedDataParallel imports _dynamo, in 3 s.
IMPORTS = ("torch._dynamo", "mlperf_bert.train", "mlperf_bert.cli.train", "mlperf_bert.run.console")
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def free_port():
    """A port that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def mpiexec_of(processes):
    """The beginning of a command in so many processes; the test is skipped where there is none."""
    import pytest

    found = Path(sys.executable).parent / "mpiexec"
    if not found.exists() and shutil.which("mpiexec") is None:
        pytest.skip("no mpiexec: tools/venv.sh dev")
    command = str(found) if found.exists() else "mpiexec"
    return [command, "-n", str(processes), sys.executable]


class _Server:
    """The process that becomes others, started where it is first needed."""

    def __init__(self):
        self._process = None

    def ask(self, request, timeout_s):
        """Statuses of the processes of a request; it and they are killed where it takes longer."""
        if self._process is None:
            interpreted = {"TRITON_INTERPRET": "1"}  # what _dynamo imports of it is made so
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, **QUIET, **interpreted},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            atexit.register(self._end)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
            if not ready:
                raise subprocess.TimeoutExpired(request["target"], timeout_s)
            return json.loads(self._process.stdout.readline())
        except BaseException:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._end()
            raise

    def _end(self):
        if self._process is not None:
            self._process.communicate()
            self._process = None


_server = _Server()


def run_forked(target, commands, *, imports=(), timeout_s=200, without_rights=False):
    """The exit status of each process, and what they printed.

    Of each process `commands` has the arguments, and what it has in its environment beside ours.
    `imports` are modules that are imported once for all of them. `without_rights`, as root: held to
    the rights of files.
    """
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        request = {
            **{"target": str(target), "imports": [*IMPORTS, *imports], "path": sys.path},
            **{"directory": os.getcwd(), "environ": dict(os.environ), "output": output.name},
            "without_rights": without_rights,
            "commands": [
                ([*map(str, words)], {name: str(value) for name, value in environ.items()})
                for words, environ in commands
            ],
        }
        statuses = _server.ask(request, timeout_s)
        return statuses, output.read()


def run_ranks(target, arguments, ranks, ranks_per_node=None, *, environ=None, **options):
    """The exit status of every rank, and what they printed; a thread each."""
    local, port = ranks_per_node or ranks, free_port()
    environs = [
        {
            **{"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % local},
            **{"LOCAL_WORLD_SIZE": local, "GROUP_RANK": rank // local},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(environ or {})},
        }
        for rank in range(ranks)
    ]
    return run_forked(target, [(arguments, environ) for environ in environs], **options)


def what_ranks_saw(script, arguments, ranks, output, **options):
    """The output of a script's `as_rank` on each rank; OUTPUT is the last of its arguments."""
    import torch

    statuses, printed = run_ranks(script, (*arguments, output), ranks, **options)
    assert statuses == [0] * ranks, printed
    return [torch.load(output / f"rank_{rank}.pt", weights_only=True) for rank in range(ranks)]


def as_rank(work, output):
    """Run `work` in the ranks' process group, and write what it returns to OUTPUT/rank_<n>.pt."""
    import torch

    from mlperf_bert.distributed.session import in_session

    def run(info, _):
        torch.save(work(info), output / f"rank_{info.rank}.pt")
        return 0

    sys.exit(in_session(run, "cpu", "refuse"))


def _give_up_rights():
    """Let root read and write only what the rights of files allow."""
    import ctypes

    overrides = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    libc = ctypes.CDLL(None)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    data[0] &= ~overrides
    data[1] &= ~overrides
    assert libc.capset(header, data) == 0


def _become(request, arguments, environ):
    """Do what the command would have done."""
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update({**request["environ"], **QUIET, **environ})
    os.chdir(request["directory"])
    target, sys.path[:] = request["target"], request["path"]
    sys.argv = [target, *arguments]
    if request["without_rights"]:
        _give_up_rights()
    if target.endswith(".py"):
        sys.path.insert(0, str(Path(target).parent))
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


def _serve():
    """Become the processes of each request, a line of JSON, and wait for them."""
    for line in sys.stdin:
        request = json.loads(line)
        sys.path[:] = request["path"]
        for module in request["imports"]:
            importlib.import_module(module)
        gc.freeze()  # the processes' collections then pass over all of it
        assert len(list(Path("/proc/self/task").iterdir())) == 1  # only this thread is copied
        children = []
        for command in request["commands"]:
            child = os.fork()
            if child == 0:
                return _become(request, *command)
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    _serve()
