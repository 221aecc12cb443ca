"""Many starts of the command line, each a process of its own, of which one has imported torch.

`forked_starts.py WITHOUT_RIGHTS` reads a JSON list of command lines from standard input.
"""

import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
from typing import NamedTuple

_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: root reads what it may not
_CAPABILITY_VERSION = 0x20080522


class Started(NamedTuple):
    """The outcome of a start."""

    status: int
    printed: str


def start_each(commands, *, without_rights=False):
    """Run them one after the other; `without_rights`, as root: held to the rights of files."""
    lines = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run(
        [sys.executable, __file__, str(int(without_rights))],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        input=lines,
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
        check=True,
    )
    return [Started(*each) for each in json.loads(done.stdout)]


def _give_up_rights():
    libc = ctypes.CDLL(None)
    header, data = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    data[0] &= ~_OVERRIDES
    data[1] &= ~_OVERRIDES
    assert libc.capset(header, data) == 0


def _started(command, *, without_rights):
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writes, 1)
        os.dup2(writes, 2)
        if without_rights:
            _give_up_rights()
        status = importlib.import_module("mlperf_bert.__main__").main(command)
        sys.stdout.flush()
        os._exit(status)
    os.close(writes)
    with open(reads, encoding="utf-8") as file:
        printed = file.read()
    return Started(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), printed)


def _main(without_rights):
    for module in ("mlperf_bert.train", "mlperf_bert.cli.train", "mlperf_bert.__main__"):
        importlib.import_module(module)
    gc.freeze()  # so that a child searches only what is its own for garbage
    commands = json.load(sys.stdin)
    each = [_started(command, without_rights=without_rights == "1") for command in commands]
    print(json.dumps(each))


if __name__ == "__main__":
    _main(*sys.argv[1:])
