"""Functions that read a rank's number from its launcher, and choose its device and CPU threads.

Functions take the environment variables as an argument, so that tests can pass a dictionary. They
import torch locally, because a process that only starts ranks does not need it.
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlperf_bert.errors import ConfigError
from mlperf_bert.files import in_brief
from mlperf_bert.machine import usable_cpus

if TYPE_CHECKING:
    import torch

Launcher = Literal["local", "torchrun", "mpi", "slurm", "single"]  # "local" is spawn.py
MEETING = "MLPERF_BERT_MEETING"  # names the file through which ranks of our own launcher meet
# Variables for the rank, the number of ranks, and the same two on the rank's node.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = tuple(
    f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PALS = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")  # as on Polaris
_SLURM = tuple(f"SLURM_{n}" for n in ("PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID"))
_TASKS = "SLURM_STEP_TASKS_PER_NODE"
# The variables from which a rank concludes that there are others.
VARIABLES = (*_TORCHRUN[:2], *_OPEN_MPI[:2], *_HYDRA[:2], "SLURM_STEP_ID", "SLURM_PROCID")
# The rank and the number of ranks, from launchers that do not set everything this program needs.
_OTHERS = (
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("PALS_RANKID", "PALS_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
)
_SET_OR_UNSET = "set the variable to such a number, or unset it"


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process among all ranks, and among the ranks of its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    launcher: Launcher

    def __post_init__(self) -> None:
        """Raise ConfigError if the launcher's numbers contradict each other."""
        in_world = 0 <= self.rank < self.world_size
        in_node = 0 <= self.local_rank < self.local_world_size <= self.world_size
        if not (in_world and in_node and self.node_rank >= 0):
            raise ConfigError(
                f"{self.launcher} environment",
                f"rank {self.rank} of {self.world_size}, local rank {self.local_rank} of "
                f"{self.local_world_size} and node {self.node_rank} contradict each other",
                "start all ranks with one launcher, or unset variables left by an earlier job",
            )


def is_silent_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True for a rank of our own launcher that leaves printing to rank 0."""
    return MEETING in environ and environ.get("RANK") != "0"


def read_rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Read this process's rank from the environment variables of its launcher.

    The function looks for the variables of our own launcher, torchrun, MPI and SLURM, in this
    order. If there are none, the process is a single rank. torchrun comes before MPI and SLURM
    because mpirun or srun may start torchrun once per node. MPI comes before SLURM because mpirun
    in a SLURM job keeps the SLURM variables of the process that called it.

    SLURM's variables count only inside an srun step. The shell of an sbatch script also has
    SLURM_PROCID=0 and SLURM_NTASKS=n although it is one process, but it has no SLURM_STEP_ID. The
    number of ranks is that of the step, not of the job. (An interactive shell is a step of one
    task.)

    An incomplete set of variables is accepted if it describes a single rank. For any other
    incomplete set, the function raises ConfigError, which names the variables that are set and
    those that are missing. It also raises ConfigError for a variable that is not a number.
    """
    environ = {name: value for name, value in environ.items() if value}
    in_slurm_step = "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ
    # srun --mpi=pmi2 sets PMI_RANK too, but not hydra's local rank, so that is a SLURM launch.
    by_pmi = "PMI_RANK" in environ and ("MPI_LOCALRANKID" in environ or not in_slurm_step)
    of_pmi = _HYDRA if "MPI_LOCALRANKID" in environ or "PMI_LOCAL_RANK" not in environ else _PALS
    launcher: Launcher = "local" if MEETING in environ else "torchrun"
    if environ.keys() >= {*_TORCHRUN}:
        return _from_names(environ, launcher, _TORCHRUN, "GROUP_RANK")
    if environ.keys() >= {*_OPEN_MPI}:
        return _from_names(environ, "mpi", _OPEN_MPI)
    if by_pmi and environ.keys() >= {*of_pmi}:
        return _from_names(environ, "mpi", of_pmi)
    if in_slurm_step and environ.keys() >= {*_SLURM, _TASKS}:
        return _from_slurm(environ)
    pmi = of_pmi if by_pmi else None
    return _from_incomplete(environ, launcher, pmi, in_slurm_step=in_slurm_step)


def _from_incomplete(
    environ: Mapping[str, str],
    launcher: Launcher,
    of_pmi: Sequence[str] | None,
    *,
    in_slurm_step: bool,
) -> RankInfo:
    """Return a single rank if no launcher has set all of its environment variables.

    Raises ConfigError if the variables describe more than one rank. The function reads torchrun's
    variables after those of MPI and SLURM, because scripts on clusters often set WORLD_SIZE.
    """
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _from_names(environ, "mpi", _OPEN_MPI)
    if of_pmi is not None:
        return _from_names(environ, "mpi", of_pmi)
    if in_slurm_step:
        return _from_slurm(environ)
    if "RANK" in environ or environ.get("WORLD_SIZE", "1") != "1":
        return _from_names(environ, launcher, _TORCHRUN)
    for names in _OTHERS:
        if names[0] in environ and environ.get(names[1]) != "1":
            raise _incomplete(environ, names, _TORCHRUN)
    return RankInfo(0, 1, 0, 1, 0, "single")


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return SLURM's name of this node, or the host's name if SLURM has not set one.

    SLURM's name is preferred because several of its nodes may run on one host.
    """
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def choose_device(
    name: Literal["auto", "cpu", "cuda"],
    info: RankInfo,
    share_gpu: Literal["refuse", "allow"] = "refuse",
) -> "torch.device":
    """Choose the device of this rank, which is `cuda:<local_rank>` or `cpu`.

    `auto` uses CUDA if it is available. Raises ConfigError for `cuda` if CUDA is not available, and
    also if the node has more ranks than GPUs, unless `share_gpu` is "allow".
    """
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        problem = "'cuda' needs a GPU, but no CUDA device is usable"
        raise ConfigError("run.device", problem, "set run.device to 'cpu'")
    gpus = torch.cuda.device_count()
    if info.local_world_size > gpus and share_gpu == "refuse":
        raise ConfigError(
            "run.device",
            f"{info.local_world_size} ranks on this node can use only {gpus} GPUs",
            "start one rank per GPU, and give each rank access to all GPUs of its node (with srun, "
            "use --gpus-per-node instead of --gpus-per-task)",
        )
    return torch.device("cuda", info.local_rank % gpus)


def set_cpu_threads(info: RankInfo, environ: Mapping[str, str] = os.environ) -> int:
    """Set torch's CPU threads to this rank's share of the node's cores, and return the number.

    The number is OMP_NUM_THREADS if that variable is set, except under torchrun, which sets it to 1
    by itself. Otherwise, in a SLURM task, the number is SLURM_CPUS_PER_TASK if that is set. In all
    other cases, it is this rank's share of the cores that its launcher may use, but at most the
    number of cores to which the launcher has bound this rank. Raises ConfigError if a variable is
    not a number above zero.
    """
    import torch

    if info.launcher != "torchrun" and "OMP_NUM_THREADS" in environ:
        # OpenMP allows one number per nesting level, and only the outermost level matters here.
        outermost = environ["OMP_NUM_THREADS"].split(",")[0]
        threads = _positive("OMP_NUM_THREADS", outermost)
    elif info.launcher in ("slurm", "single") and "SLURM_CPUS_PER_TASK" in environ:
        threads = _positive("SLURM_CPUS_PER_TASK", environ["SLURM_CPUS_PER_TASK"])
    else:
        own = usable_cpus()
        # A launcher that binds ranks may itself use more cores. Several ranks may share a binding.
        share = len(own | usable_cpus(os.getppid())) // info.local_world_size
        threads = max(1, min(len(own), share))
    torch.set_num_threads(threads)
    return threads


def backend_for(info: RankInfo, device: "torch.device") -> Literal["nccl", "gloo"]:
    """Return "nccl" if every rank of this node has its own GPU, and "gloo" otherwise."""
    import torch

    own_gpus = device.type == "cuda" and info.local_world_size <= torch.cuda.device_count()
    return "nccl" if own_gpus else "gloo"


def _from_names(
    environ: Mapping[str, str], launcher: Launcher, names: Sequence[str], node: str = ""
) -> RankInfo:
    """Read this process's rank from the environment variables in `names`.

    They are the variables of the rank, the number of ranks, the local rank, and the number of ranks
    on the node. `node` is the variable of the node's number, or empty if there is none.
    """
    rank, size, local_rank, local_size = names
    if not all(name in environ for name in names):
        if _is_alone(environ, rank, size):
            return RankInfo(0, 1, 0, 1, 0, "single")
        raise _incomplete(environ, names, names)
    on_node = _positive(local_size, environ[local_size])
    own, of, local = (_number(environ, name) for name in (rank, size, local_rank))
    # MPI does not number the nodes, and places ranks node by node unless told otherwise.
    node_rank = _number(environ, node) if node in environ else own // on_node
    return RankInfo(own, of, local, on_node, node_rank, launcher)


def _is_alone(environ: Mapping[str, str], rank: str, size: str) -> bool:
    """Return True if a launcher's variables say that this process is the only rank."""
    return _number(environ, size, "0") == 1 and _number(environ, rank, "0") == 0


def _incomplete(
    environ: Mapping[str, str], names: Sequence[str], wanted: Sequence[str]
) -> ConfigError:
    """Return the error for a launcher that has set some of `names`, but not all of `wanted`."""
    seen = [name for name in names if name in environ]
    missing = [name for name in wanted if name not in environ]
    values = " and ".join(f"{name}={in_brief(environ[name])}" for name in seen)
    return ConfigError(
        "launcher",
        f"{values} {'is' if len(seen) == 1 else 'are'} set, but {', '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not",
        f"start all ranks with torchrun, srun or mpiexec, which set all of these variables, or "
        f"unset {' '.join(seen)} to run a single rank",
    )


def _from_slurm(environ: Mapping[str, str]) -> RankInfo:
    """Read this process's rank from SLURM's variables. Raises ConfigError if one is missing."""
    if not all(each in environ for each in (*_SLURM, _TASKS)):
        if _is_alone(environ, _SLURM[0], _SLURM[1]):
            return RankInfo(0, 1, 0, 1, 0, "single")
        raise _incomplete(environ, ("SLURM_STEP_ID", *_SLURM, _TASKS), (*_SLURM, _TASKS))
    rank, world_size, local_rank, node = (_number(environ, each) for each in _SLURM)
    sizes: list[int] = []
    # SLURM abbreviates equal nodes: `8(x2),4` means two nodes of 8 tasks and one of 4.
    for part in environ[_TASKS].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            problem = f"{environ[_TASKS]!r} is not a list of numbers such as 8(x2),4"
            raise ConfigError(_TASKS, problem, "start the ranks with srun, which sets this list")
        sizes += [int(match[1])] * int(match[2] or 1)
    if node >= len(sizes):
        problem = f"the list {environ[_TASKS]!r} has no entry for node {node}"
        raise ConfigError(_TASKS, problem, "check SLURM_NODEID")
    # An interactive shell is a step of one task, from which the program starts the ranks itself.
    launcher: Launcher = "slurm" if world_size > 1 else "single"
    return RankInfo(rank, world_size, local_rank, sizes[node], node, launcher)


def text_of(environ: Mapping[str, str], name: str) -> str:
    """Return the value of an environment variable. Raises ConfigError if it is not set."""
    if name not in environ:
        problem = "the variable is not set, although others of the same launcher are set"
        raise ConfigError(name, problem, "start ranks with the launcher, which sets this variable")
    return environ[name]


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    """Return an environment variable as an integer. Raises ConfigError unless it is at least 0."""
    text = text_of(environ, name) if default is None else environ.get(name, default)
    if not re.fullmatch(r"[0-9]{1,12}", text.strip()):
        raise ConfigError(name, f"must be an integer of at least 0, not {text!r}", _SET_OR_UNSET)
    return int(text)


def _positive(name: str, text: str) -> int:
    """Return the number in a variable's `text`. Raises ConfigError unless it is above zero."""
    number = _number({name: text}, name)
    if number < 1:
        raise ConfigError(name, f"must be an integer above 0, not {text!r}", _SET_OR_UNSET)
    return number
