"""Runs of two ranks, each with other settings, in processes forked from one that has imported all.

`setting_runs.py` reads a JSON list of `Job`s from standard input and prints each one's exit
statuses. `setting_runs.py RANK-WORDS` is one process of a job that mpiexec started: reader
processes need MPI, which a forked process cannot join.

What is different from a usual run:

- a gather of sharded weights completes only when it is waited for, and until then its weights are
  NaN: whoever reads them too early spoils the loss;
- `model.kernels = "fused"` runs in Triton's interpreter (TRITON_INTERPRET=1 before this starts);
- nvidia-dali is dali_stand_in.py.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import dali_stand_in
from forked_ranks import free_port, mpiexec_of
from mlperf_bert.__main__ import main
from mlperf_bert.distributed import flat_reducer
from mlperf_bert.model import bert

RANKS = 2
_LONGEST_S = 240.0  # of a job


class Job(NamedTuple):
    """A command of `mlperf_bert` for all ranks; what they print goes to `output`."""

    words: list[str]
    output: str
    by_mpi: bool = False
    waits: bool = True  # false: a forward reads weights without waiting for them


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


def train(words, *, waits=True):
    """The status of the command in this process."""
    usual = bert.choose_blocks

    def choose_blocks(config, *arguments):
        if config.kernels != "fused":
            return usual(config, *arguments)
        from mlperf_bert.model.fused_blocks import FusedBlocks

        hasten_the_interpreter()
        return FusedBlocks(*arguments[1:])

    with pytest.MonkeyPatch.context() as patch:
        dali_stand_in.install(patch)
        make_gathers_late(patch)
        patch.setattr(bert, "choose_blocks", choose_blocks)
        if not waits:
            from mlperf_bert.distributed.flat_reducer import ArrivingParameters

            patch.setattr(ArrivingParameters, "__getitem__", dict.__getitem__)
        return main(list(words))


def _fork(job):
    """The statuses of its ranks."""
    port, children = free_port(), []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _print_to(job.output)
                own = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
                own |= {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0}
                own |= {"MASTER_ADDR": "127.0.0.1"}
                os.environ.update({name: str(value) for name, value in own.items()})
                status = train(job.words, waits=job.waits)
            except Exception:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    return [_status(child) for child in children]


def _print_to(output):
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _status(child):
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -9


def _by_mpi(job):
    with open(job.output, "ab") as output:
        process = subprocess.Popen(
            [*mpiexec_of(2 * RANKS), __file__, *job.words],
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return [process.wait(_LONGEST_S)]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return [process.wait()]


def run_jobs(jobs, directory):
    """Run them one after the other, in a process of their own; yield the exit statuses of each."""
    with subprocess.Popen(
        [sys.executable, __file__],
        env={
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TRITON_INTERPRET": "1"},
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=directory,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        with process.stdin:
            json.dump([job._asdict() for job in jobs], process.stdin)
        for line in process.stdout:
            yield json.loads(line)
    assert process.returncode == 0


def _main():
    if len(sys.argv) > 1:
        sys.exit(train(sys.argv[1:]))
    jobs = [Job(**each) for each in json.load(sys.stdin)]
    for module in ("cli.train", "model.fused_blocks", "optim.cpu_kernels", "run.console", "train"):
        importlib.import_module(f"mlperf_bert.{module}")
    importlib.import_module("torch._dynamo")  # DistributedDataParallel imports it, in 3 s
    gc.freeze()  # the ranks' collections then pass over all of it
    assert len(list(Path("/proc/self/task").iterdir())) == 1  # only this thread would be copied
    for job in jobs:
        print(json.dumps(_by_mpi(job) if job.by_mpi else _fork(job)), flush=True)


if __name__ == "__main__":
    _main()
