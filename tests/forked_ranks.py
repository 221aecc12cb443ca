"""Ranks of one machine without a launcher: `forked_ranks.py SETTINGS TARGET [ARGUMENT ...]`.

Importing torch costs as much as most of what tests have ranks do, so one process imports it and
becomes all ranks. TARGET is a script, or a module where it does not end in .py: a test file says by
`as_rank` what its ranks do, and reads by `what_ranks_saw` what they found. What launchers do is
tested with launchers (distributed/test_ranks.py).
"""

import gc
import importlib
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


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


def run_ranks(
    target,
    arguments,
    ranks,
    ranks_per_node=None,
    *,
    imports=("mlperf_bert.train", "mlperf_bert.cli.train"),
    timeout_s=200,
):
    """The exit status of every rank, and what they printed; a thread each.

    `imports` are the modules that are imported once for all of them.
    """
    settings = json.dumps([ranks, ranks_per_node or ranks, free_port(), *imports])
    command = [sys.executable, __file__, settings, str(target), *map(str, arguments)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    printed, _, statuses = done.stdout.rpartition("statuses ")
    assert done.returncode == 0 and statuses, done.stdout
    return json.loads(statuses), printed


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


def run_as_rank(target, arguments):
    """Do what the command would have done."""
    sys.argv = [target, *arguments]
    if target.endswith(".py"):
        sys.path.insert(0, str(Path(target).parent))
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


def main(settings, target, *arguments):
    """Become the ranks, and wait for them."""
    ranks, local, port, *imports = json.loads(settings)
    for module in imports:
        importlib.import_module(module)
    gc.freeze()  # so that a child searches only what is its own for garbage
    assert len(list(Path("/proc/self/task").iterdir())) == 1  # only this thread would be copied
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            of_rank = {
                **{"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % local},
                **{"LOCAL_WORLD_SIZE": local, "GROUP_RANK": rank // local},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            }
            os.environ.update({name: str(value) for name, value in of_rank.items()})
            return run_as_rank(target, list(arguments))
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print("statuses", json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
