"""Trainers and readers among the processes that mpiexec started; start and end of MPI.

On every node the first half of the processes are trainers, the ranks of torch.distributed; the
second half are readers, one for each trainer, without a GPU and outside torch.distributed.
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
    """The part of a process in the job."""

    is_reader: bool
    info: RankInfo  # the trainer's rank, or that of the trainer this reader serves
    partner: int  # the other one of the pair, among all processes


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiProcess:
    """A process with its role and its communicators."""

    role: Role
    world: "MPI.Comm"  # all processes
    same_role: "MPI.Comm"  # all trainers, or all readers
    same_role_on_node: "MPI.Comm"

    def peers(self, policy: BalancePolicy) -> "MPI.Comm | None":
        """The readers that a reader exchanges with; None where the policy exchanges nothing."""
        by_policy = {
            "exchange_global": self.same_role,
            "exchange_local": self.same_role_on_node,
        }
        return by_policy.get(policy)


def role_of(process: RankInfo) -> Role:
    """The role of a process, given its number among all started processes.

    Raises ConfigError if they cannot be paired.
    """
    remedy = "start two processes a rank: mpiexec -n <2 x ranks> mlperf_bert train ..."
    if process.launcher not in ("mpi", "slurm"):
        raise ConfigError(_SETTING, f"'mpi_readers' under {process.launcher!r}, not MPI", remedy)
    on_node, node = process.local_world_size, process.node_rank
    if on_node % 2:
        raise ConfigError(_SETTING, f"'mpi_readers' with {on_node} processes on a node", remedy)
    if process.world_size % on_node or process.rank != node * on_node + process.local_rank:
        problem = "'mpi_readers' needs the same number of consecutive processes on every node"
        raise ConfigError(_SETTING, problem, "place them node by node: mpiexec -ppn <2 x ranks>")
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
    """Start MPI, and end it together with all others unless an error was raised.

    A failing process must not end MPI: that would wait for the others, which wait for it. It leaves
    with an exit status of its own, and mpiexec ends the others. Raises ConfigError if there is no
    MPI, or it does not know the launcher's processes.
    """
    role = role_of(process)
    world = _begin()
    if (world.rank, world.size) != (process.rank, process.world_size):
        raise ConfigError(
            _SETTING,
            f"MPI sees process {world.rank} of {world.size}, the launcher {process.rank} of "
            f"{process.world_size}",
            "start with the mpiexec of the MPI that mpi4py uses",
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
    require_packages(_SETTING, "mpi", "mpi4py", purpose="and an MPI library", may_ask=False)
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        problem = f"mpi4py found no MPI library ({error})"
        raise ConfigError(_SETTING, problem, "install an MPI such as MPICH or Open MPI") from None
    # Two threads of a trainer call MPI in turn: the main one before and after the loader's
    # lifetime.
    if MPI.Init_thread(MPI.THREAD_SERIALIZED) < MPI.THREAD_SERIALIZED:
        problem = "this MPI was built without support for threads"
        raise ConfigError(_SETTING, problem, "use another MPI, or loader 'thread'")
    return MPI.COMM_WORLD


def _end(world: "MPI.Comm") -> None:
    from mpi4py import MPI

    everyone_is_here = world.Ibarrier()
    while not everyone_is_here.Test():  # readers arrive early, and MPI's own end would spin
        time.sleep(_POLL_S)
    MPI.Finalize()
