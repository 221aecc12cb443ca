"""Who is this process, and with whom does it talk: ranks, threads and process group.

Environment variables are an argument, so that tests pass a dictionary. torch is imported where
it is used: who only starts ranks does without.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.distributed.meeting_point import (
    file_store,
    interface_of,
    own_address,
    rendezvous,
    store_of_rank_zero,
)

if TYPE_CHECKING:
    import torch

Launcher = Literal["local", "torchrun", "mpi", "slurm", "single"]  # local: our own, spawn.py
MEETING = "MLPERF_BERT_MEETING"  # the file through which ranks of our own launcher meet
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class RankInfo:
    """This process among all (`rank` of `world_size`) and among those of its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    launcher: Launcher
    binding: str = ""  # in words, once it is done (binding.py)

    def __post_init__(self) -> None:
        """Raise ConfigError where the launcher's numbers contradict each other."""
        in_world = 0 <= self.rank < self.world_size
        in_node = 0 <= self.local_rank < self.local_world_size <= self.world_size
        if not (in_world and in_node and self.node_rank >= 0):
            raise ConfigError(
                f"{self.launcher} environment",
                f"rank {self.rank} of {self.world_size}, local rank {self.local_rank} of "
                f"{self.local_world_size}, node {self.node_rank} contradict each other",
                "start all ranks with one launcher, or unset left-over variables",
            )


def read_rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Read the rank from our, torchrun's, MPI's or SLURM's variables, in this order; else one.

    torchrun comes early because it may itself be started by MPI or srun, once a node; MPI before
    SLURM because mpirun in a SLURM job leaves SLURM's variables of the outer process behind.

    SLURM counts only inside an srun step. The shell of an sbatch script also has SLURM_PROCID=0
    and SLURM_NTASKS=n, though it is one process: what tells them apart is SLURM_STEP_ID. The size
    is that of the step (an interactive shell is a step of one task), not of the job.

    Raises ConfigError naming the variable that is missing or no number.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _from_mpi(environ, _OPEN_MPI)
    in_slurm_step = "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ
    # srun --mpi=pmi2 sets PMI_RANK too, but not hydra's local rank: that is a SLURM launch.
    if "PMI_RANK" in environ and ("MPI_LOCALRANKID" in environ or not in_slurm_step):
        return _from_mpi(environ, _HYDRA)
    if in_slurm_step:
        return _from_slurm(environ)
    return RankInfo(0, 1, 0, 1, 0, "single")


def backend_for(info: RankInfo, device: "torch.device") -> Literal["nccl", "gloo"]:
    """What the ranks of `device`'s kind talk over: nccl wants a GPU for each of them."""
    import torch

    own_gpus = device.type == "cuda" and info.local_world_size <= torch.cuda.device_count()
    return "nccl" if own_gpus else "gloo"


def init_process_group(
    info: RankInfo,
    device: "torch.device",
    *,
    timeout: timedelta = timedelta(minutes=10),
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Make `device` current and join the other ranks over `backend_for` of them.

    One rank alone gets no process group: code that communicates must ask for world_size > 1.
    `timeout` bounds the start and every later collective. Raises ConfigError where rank 0's
    address is not known.
    """
    import torch
    import torch.distributed as dist

    from mlperf_bert.distributed.fresh_store import fresh_store

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if info.world_size == 1:
        return
    backend = backend_for(info, device)
    store = open_store(info, timeout, environ)
    if info.launcher == "torchrun" and environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        store = fresh_store(store, info.rank, info.world_size, timeout)
    dist.init_process_group(
        backend=backend,
        store=store,
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )


def open_store(info: RankInfo, timeout: timedelta, environ: Mapping[str, str] = os.environ) -> Any:
    """The `torch.distributed.Store` of this start: our launcher's, torchrun's or rank 0's.

    Over several hosts gloo is told to talk through the interface that leads to rank 0's, unless the
    user says which. Raises ConfigError where that cannot be told or had; LostRanksError where it
    does not answer.
    """
    import torch.distributed as dist

    if info.launcher == "local":
        return file_store(environ[MEETING], timeout)
    address, port = rendezvous(info, environ)
    if info.launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        meet = dist.rendezvous  # type: ignore[attr-defined]
        store, _, _ = next(meet("env://", info.rank, info.world_size, timeout=timeout))
    else:
        store = store_of_rank_zero(address, port, info, timeout)
    if _GLOO_INTERFACE not in environ:
        interface = interface_of(own_address(address, port, f"rank {info.rank}", timeout))
        if interface is not None:
            os.environ[_GLOO_INTERFACE] = interface
    return store


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """The node's name: SLURM's, since several of its nodes may be one host, or the host's."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def restart_count(environ: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has restarted its ranks; 0 under any other launcher.

    Raises ConfigError where the variable is not a number.
    """
    name = "TORCHELASTIC_RESTART_COUNT"
    return _number(environ, name) if name in environ else 0


def shutdown() -> None:
    """Leave the process group, if this process is in one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class _MpiNames:
    rank: str
    size: str
    local_rank: str
    local_size: str


_OPEN_MPI = _MpiNames(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = _MpiNames("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _from_torchrun(environ: Mapping[str, str]) -> RankInfo:
    rank = _number(environ, "RANK")
    local_size = positive("LOCAL_WORLD_SIZE", _text(environ, "LOCAL_WORLD_SIZE"))
    node = _number(environ, "GROUP_RANK") if "GROUP_RANK" in environ else rank // local_size
    size = _number(environ, "WORLD_SIZE")
    launcher: Launcher = "local" if MEETING in environ else "torchrun"
    return RankInfo(rank, size, _number(environ, "LOCAL_RANK"), local_size, node, launcher)


def _from_mpi(environ: Mapping[str, str], names: _MpiNames) -> RankInfo:
    rank = _number(environ, names.rank)
    local_size = positive(names.local_size, _text(environ, names.local_size))
    # MPI does not name the node; ranks are placed node by node unless the user says otherwise.
    return RankInfo(
        rank=rank,
        world_size=_number(environ, names.size),
        local_rank=_number(environ, names.local_rank),
        local_world_size=local_size,
        node_rank=rank // local_size,
        launcher="mpi",
    )


def _from_slurm(environ: Mapping[str, str]) -> RankInfo:
    in_step = "SLURM_STEP_NUM_TASKS" in environ
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS" if in_step else "SLURM_NTASKS")
    node = _number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    return RankInfo(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world_size=_slurm_local_size(environ, node, world_size),
        node_rank=node,
        launcher="slurm",
    )


def _slurm_local_size(environ: Mapping[str, str], node: int, world_size: int) -> int:
    if world_size == 1:
        return 1
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name not in environ:
        return _number(environ, "SLURM_NTASKS_PER_NODE")
    # SLURM writes runs of equal nodes as `8(x2),4`: two nodes of 8 tasks, one of 4.
    sizes: list[int] = []
    for part in environ[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(name, f"is {environ[name]!r}", "expected numbers such as 8(x2),4")
        sizes += [int(match[1])] * int(match[2] or 1)
    if node >= len(sizes):
        raise ConfigError(name, f"{environ[name]!r} has no node {node}", "check SLURM_NODEID")
    return sizes[node]


def _text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise ConfigError(name, "is not set although its launcher is", "start with the launcher")
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not re.fullmatch(r"[0-9]{1,12}", text.strip()):
        raise ConfigError(name, f"is {text!r}", "it must be a number of at least 0")
    return int(text)


def positive(name: str, text: str) -> int:
    """The number that a variable holds. Raises ConfigError where it is none above zero."""
    number = _number({name: text}, name)
    if number < 1:
        raise ConfigError(name, f"is {text!r}", "it must be a number above 0")
    return number
