"""Runs of two ranks, each with other settings.

`setting_runs.py WAITS WORDS...` is one process of a job: forked from one that has imported all, or
started by mpiexec, as reader processes need MPI, which a forked process cannot join.

What is different from a usual run:

- a gather of sharded weights completes only when it is waited for, and until then its weights are
  NaN: whoever reads them too early spoils the loss;
- `model.kernels = "fused"` runs in Triton's interpreter;
- nvidia-dali is dali_stand_in.py.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import dali_stand_in
from forked_ranks import free_port, mpiexec_of, run_ranks
from mlperf_bert.__main__ import entry
from mlperf_bert.distributed import flat_reducer
from mlperf_bert.model import bert

RANKS = 2
LONGEST_S = 240.0  # of a job
INTERPRETED = {"TRITON_INTERPRET": "1"}


class Job(NamedTuple):
    """A command of `mlperf_bert` for all ranks; what they print goes to `output`."""

    words: list[str]
    output: str
    by_mpi: bool = False
    waits: bool = True  # false: a micro-batch reads weights without waiting for them


class LateGather:
    """The handle of an all-gather that begins, and ends, when it is waited for."""

    def __init__(self, gather, whole, piece, group):
        self._gather = gather
        self._whole, self._piece, self._group = whole, piece, group
        with torch.no_grad():
            whole.fill_(torch.nan)

    def wait(self):
        with torch.no_grad():
            self._gather(self._whole, self._piece, group=self._group)


def make_gathers_late(patch):
    """Make every gather of weights a late one."""
    usual = flat_reducer.renamed

    def renamed(old, new):
        collective = usual(old, new)
        if old != "all_gather_into_tensor":
            return collective

        def gather(whole, piece, group=None, async_op=False):
            if not async_op:  # random streams for a checkpoint
                return collective(whole, piece, group=group)
            return LateGather(collective, whole, piece, group)

        return gather

    patch.setattr(flat_reducer, "renamed", renamed)


def hasten_the_interpreter():
    """Have Triton's interpreter patch its language once, not at every call: twice as fast."""
    import triton.language as tl
    from triton.runtime import interpreter

    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(both)
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)


def alter(*, waits):
    """Have this process run the way that is said above, to its end."""
    usual, patch = bert.choose_blocks, pytest.MonkeyPatch()

    def choose_blocks(config, *arguments):
        if config.kernels != "fused":
            return usual(config, *arguments)
        from mlperf_bert.model.fused_blocks import FusedBlocks

        hasten_the_interpreter()
        return FusedBlocks(*arguments[1:])

    dali_stand_in.install(patch)
    make_gathers_late(patch)
    patch.setattr(bert, "choose_blocks", choose_blocks)
    if not waits:
        from mlperf_bert.distributed.flat_reducer import ArrivingParameters

        patch.setattr(ArrivingParameters, "__getitem__", dict.__getitem__)


def _by_mpi(job):
    with open(job.output, "ab") as output:
        process = subprocess.Popen(
            [*mpiexec_of(2 * RANKS), __file__, *_arguments(job)],
            env={
                **os.environ,
                **INTERPRETED,
                **{"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()},
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return [process.wait(LONGEST_S)]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return [process.wait()]


def _arguments(job):
    return [str(int(job.waits)), *job.words]


def run_jobs(jobs):
    """Run them one after the other; yield the exit statuses of each."""
    for job in jobs:
        if job.by_mpi:
            yield _by_mpi(job)
            continue
        options = {"environ": INTERPRETED, "timeout_s": LONGEST_S}
        statuses, printed = run_ranks(__file__, _arguments(job), RANKS, **options)
        Path(job.output).write_text(printed)
        yield statuses


if __name__ == "__main__":
    alter(waits=sys.argv[1] == "1")
    del sys.argv[1]
    entry()  # which ends a rank without the interpreter's end, in which gloo's threads may abort
