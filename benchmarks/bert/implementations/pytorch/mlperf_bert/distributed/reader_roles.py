"""Roles of the processes that mpiexec started, and functions that initialize and finalize MPI.

On every node, the first half of the processes are trainers, which are the ranks of
torch.distributed. The second half are readers, which read samples for the trainers. There is one
reader per trainer. Readers have no GPU and take no part in torch.distributed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlperf_bert.config.sections import BalancePolicy
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.errors import ConfigError
from mlperf_bert.extras import require_packages

if TYPE_CHECKING:
    from mpi4py import MPI

_SETTING = "data.loader"
_POLL_S = 1e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """The task of a process, which is to train or to read samples, and its partner process."""

    is_reader: bool
    info: RankInfo  # the trainer's rank, or the rank of the trainer that this reader serves
    partner: int  # number of the other process of the pair, among all processes


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiProcess:
    """A process of the MPI job, with its role and its communicators."""

    role: Role
    world: "MPI.Comm"  # all processes
    same_role: "MPI.Comm"  # all trainers, or all readers
    same_role_on_node: "MPI.Comm"

    def peers(self, policy: BalancePolicy) -> "MPI.Comm | None":
        """Return the communicator of the readers that exchange samples with this reader.

        Returns None if the policy exchanges no samples.
        """
        by_policy = {
            "exchange_global": self.same_role,
            "exchange_local": self.same_role_on_node,
        }
        return by_policy.get(policy)


def role_of(process: RankInfo) -> Role:
    """Return whether a process is a trainer or a reader, and which process is its partner.

    `process` contains the rank among all processes that mpiexec started. Raises ConfigError if the
    processes cannot be paired.
    """
    remedy = "start two processes per rank, with mpiexec -n <2 x ranks> mlperf_bert train ..."
    if process.launcher not in ("mpi", "slurm"):
        problem = f"'mpi_readers' needs MPI, but the launcher is {process.launcher!r}"
        raise ConfigError(_SETTING, problem, remedy)
    on_node, node = process.local_world_size, process.node_rank
    if on_node % 2:
        problem = f"'mpi_readers' needs an even number of processes per node, not {on_node}"
        raise ConfigError(_SETTING, problem, remedy)
    if process.world_size % on_node or process.rank != node * on_node + process.local_rank:
        problem = "'mpi_readers' needs the same number of consecutive processes on every node"
        remedy = "place processes node by node, with mpiexec -ppn <2 x ranks per node>"
        raise ConfigError(_SETTING, problem, remedy)
    pairs = on_node // 2
    is_reader = process.local_rank >= pairs
    local_rank = process.local_rank % pairs
    trainer = replace(
        process,
        rank=node * pairs + local_rank,
        world_size=process.world_size // 2,
        local_rank=local_rank,
        local_world_size=pairs,
    )
    partner = process.rank - pairs if is_reader else process.rank + pairs
    return Role(is_reader=is_reader, info=trainer, partner=partner)


@contextmanager
def mpi_process(process: RankInfo) -> Iterator[MpiProcess]:
    """Return a context manager that starts MPI, and finalizes it together with all other processes.

    If the `with` block raises an error, MPI is not finalized, because that would wait for the other
    processes, which wait for this one. The process exits with its own status instead, and mpiexec
    ends the others. Raises ConfigError if there is no MPI library, or if MPI and the launcher
    number the processes differently.
    """
    role = role_of(process)
    world = _begin()
    if (world.rank, world.size) != (process.rank, process.world_size):
        raise ConfigError(
            _SETTING,
            f"MPI numbers this process {world.rank} of {world.size}, but the launcher numbers it "
            f"{process.rank} of {process.world_size}",
            "start the processes with the mpiexec of the MPI library that mpi4py uses",
        )
    role_on_node = 2 * role.info.node_rank + int(role.is_reader)
    yield MpiProcess(
        role=role,
        world=world,
        same_role=world.Split(int(role.is_reader)),
        same_role_on_node=world.Split(role_on_node),
    )
    _end(world)


def _begin() -> "MPI.Comm":
    """Initialize MPI, and return the communicator of all processes.

    Raises ConfigError if MPI is missing, or does not support threads.
    """
    require_packages(_SETTING, "mpi", "mpi4py", purpose="and an MPI library")
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        problem = f"mpi4py found no MPI library ({error})"
        raise ConfigError(_SETTING, problem, "install MPICH, Open MPI or another MPI") from None
    # Two threads of a trainer call MPI in turn. The main thread calls it before the loader's thread
    # starts and after it has ended.
    if MPI.Init_thread(MPI.THREAD_SERIALIZED) < MPI.THREAD_SERIALIZED:
        problem = "'mpi_readers' needs an MPI library with thread support"
        remedy = "use another MPI library, or set data.loader to 'thread'"
        raise ConfigError(_SETTING, problem, remedy)
    return MPI.COMM_WORLD


def _end(world: "MPI.Comm") -> None:
    """Wait until all processes have called this function, and finalize MPI."""
    from mpi4py import MPI

    everyone_is_here = world.Ibarrier()
    while not everyone_is_here.Test():  # sleeps, because MPI's own wait would use a whole core
        time.sleep(_POLL_S)
    MPI.Finalize()
