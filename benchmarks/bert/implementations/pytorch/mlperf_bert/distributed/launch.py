"""Functions that read a rank's number, find the other ranks, and join the process group.

The ranks of our own launcher meet through a file, and other ranks through a store on rank 0. Rank 0
serves the store on one address only, because torch's own store listens on every interface and
accepts every connection.

Functions take the environment variables as an argument, so that tests can pass a dictionary. They
import torch locally, because a process that only starts ranks does not need it.
"""

import errno
import fcntl
import hashlib
import ipaddress
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlperf_bert.errors import ConfigError, LostRanksError, say
from mlperf_bert.files import in_brief
from mlperf_bert.machine import usable_cpus

if TYPE_CHECKING:
    import torch

Launcher = Literal["local", "torchrun", "mpi", "slurm", "single"]  # "local" is spawn.py
MEETING = "MLPERF_BERT_MEETING"  # names the file through which ranks of our own launcher meet
_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_FIRST_PORT, _PORTS = 20_000, 12_000  # below the kernel's ports for outgoing connections
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_OPEN_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
# Variables for the rank, the number of ranks, and the same two on the rank's node.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = tuple(
    f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PALS = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")  # as on Polaris
_SLURM = tuple(f"SLURM_{n}" for n in ("PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID"))
_TASKS = "SLURM_STEP_TASKS_PER_NODE"
# The rank and the number of ranks, from launchers that do not set everything this program needs.
_OTHERS = (
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("PALS_RANKID", "PALS_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
)
_SET_OR_UNSET = "set the variable to such a number, or unset it"
_BACKLOG = 4096  # ranks that may connect at the same time
_POLL_S = 0.05
WAITING_S = 30.0  # how long rank 0 waits for other ranks before it says so
_SIOCGIFADDR = 0x8915  # Linux's request for the IPv4 address of an interface


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


def is_requeued(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if SLURM has requeued this job and restarted it."""
    return environ.get("SLURM_RESTART_COUNT", "0") != "0"


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
    by itself. Otherwise, in an srun step, the number is SLURM_CPUS_PER_TASK if that is set. In all
    other cases, it is the number of cores that this process may use, divided by the ranks on the
    node. Raises ConfigError if a variable is not a number above zero.
    """
    import torch

    if info.launcher != "torchrun" and "OMP_NUM_THREADS" in environ:
        # OpenMP allows one number per nesting level, and only the outermost level matters here.
        outermost = environ["OMP_NUM_THREADS"].split(",")[0]
        threads = _positive("OMP_NUM_THREADS", outermost)
    elif info.launcher == "slurm" and "SLURM_CPUS_PER_TASK" in environ:
        threads = _positive("SLURM_CPUS_PER_TASK", environ["SLURM_CPUS_PER_TASK"])
    else:
        threads = max(1, len(usable_cpus()) // info.local_world_size)
    torch.set_num_threads(threads)
    return threads


def backend_for(info: RankInfo, device: "torch.device") -> Literal["nccl", "gloo"]:
    """Return "nccl" if every rank of this node has its own GPU, and "gloo" otherwise."""
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
    """Select `device` as torch's current device, and join the process group of all ranks.

    A single rank gets no process group, so code that communicates must check for world_size > 1.
    `timeout` limits the start and every later collective. Raises ConfigError if the address of rank
    0 is unknown, or if torchrun would restart ranks by itself.
    """
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
    _refuse_restarts(environ)
    if info.world_size == 1:
        return
    backend = backend_for(info, device)
    check_interfaces(environ, backend)
    store = open_store(info, timeout, environ)
    dist.init_process_group(
        backend=backend,
        store=store,
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )


def check_interfaces(environ: Mapping[str, str], backend: Literal["nccl", "gloo"]) -> None:
    """Raise ConfigError if the user has set a network interface that this rank cannot use.

    GLOO_SOCKET_IFNAME contains full names. gloo also connects the ranks of an NCCL group.
    NCCL_SOCKET_IFNAME contains prefixes of names, full names after `=`, or prefixes to exclude
    after `^`.
    """
    names_here = [name for _, name in socket.if_nameindex()]
    choices = f"one of this host's interfaces ({', '.join(names_here)})"
    set_or_unset = f"set the variable to {choices}, or unset it"
    for name in filter(None, environ.get(_GLOO_INTERFACE, "").split(",")):
        if name not in names_here and _ipv4_of(name) is None:  # aliases (eth0:1) are not listed
            problem = f"this host has no network interface named {in_brief(name)}"
            raise ConfigError(_GLOO_INTERFACE, problem, set_or_unset)
        if not has_address(name):
            problem = f"the network interface {name} has no IP address"
            remedy = f"bring {name} up (ip link set {name} up), or set the variable to {choices}"
            raise ConfigError(_GLOO_INTERFACE, problem, remedy)
    wanted = environ.get(_NCCL_INTERFACE, "")
    if backend == "nccl" and wanted and not wanted.startswith("^"):
        names = wanted.removeprefix("=").split(",")
        fits = str.__eq__ if wanted.startswith("=") else str.startswith
        if not any(fits(each, name) for each in names_here for name in names):
            problem = f"no network interface of this host matches {in_brief(wanted)}"
            raise ConfigError(_NCCL_INTERFACE, problem, set_or_unset)


def has_address(interface: str) -> bool:
    """Return True if a network interface has an IP address, or if this system is not Linux."""
    if sys.platform != "linux":
        return True
    if _ipv4_of(interface) is not None:
        return True
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return False
    return any(line.split()[-1] == interface for line in lines)


def _refuse_restarts(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if torchrun would restart ranks by itself."""
    # Restarted ranks get the old store, with addresses of processes that ended (torch 2.13).
    name = "TORCHELASTIC_MAX_RESTARTS"
    if environ.get(name, "0") != "0":
        problem = f"the value is {environ[name]!r}, but restarted ranks cannot rejoin a run"
        remedy = "start torchrun without --max-restarts, and use --resume auto after a crash"
        raise ConfigError(name, problem, remedy)


@contextmanager
def warn_if_waiting(
    info: RankInfo, environ: Mapping[str, str] = os.environ, after_s: float = WAITING_S
) -> Iterator[None]:
    """Return a context manager that prints a message if the other ranks do not arrive.

    Rank 0 prints it after `after_s` seconds. The message names the environment variables from which
    this rank concludes that there are other ranks. These variables may be left over from an earlier
    job in the same shell or container.
    """
    known = (*_TORCHRUN[:2], *_OPEN_MPI[:2], *_HYDRA[:2], "SLURM_STEP_ID", "SLURM_PROCID")
    seen = [name for name in known if name in environ]

    def say_waiting() -> None:
        names = " and ".join(seen)
        say(
            f"waiting for {info.world_size - 1:,} other ranks, because {names} "
            f"{'is' if len(seen) == 1 else 'are'} set; if there are no other ranks, unset {names}"
        )

    timer = threading.Timer(after_s, say_waiting)
    timer.daemon = True
    if info.rank == 0 and info.world_size > 1 and info.launcher != "local":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def shutdown() -> None:
    """Leave the process group if this process is in one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def open_store(info: RankInfo, timeout: timedelta, environ: Mapping[str, str] = os.environ) -> Any:
    """Open the `torch.distributed.Store` through which the ranks meet.

    It is the store of our own launcher, of torchrun, or of rank 0. On several hosts, the function
    also sets gloo's interface to the one that leads to rank 0, unless the user has set one. Raises
    ConfigError if the address of the store is unknown or unusable, and LostRanksError if the store
    does not answer.
    """
    import torch.distributed as dist

    if info.launcher == "local":
        store = dist.FileStore(environ[MEETING])  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return store
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


def rendezvous(info: RankInfo, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the host and the port at which rank 0 serves the store.

    They are MASTER_ADDR and MASTER_PORT if these are set. Otherwise the host is the first node, and
    the port is computed from values that identify this start of the job. Raises ConfigError if the
    host or the port cannot be determined.
    """
    if info.launcher == "torchrun":
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environ:
                problem = "the variable is not set, although RANK is set"
                remedy = "start the ranks with torchrun, which sets MASTER_ADDR and MASTER_PORT"
                raise ConfigError(name, problem, remedy)
    address = environ.get("MASTER_ADDR") or _default_address(info, environ)
    if "MASTER_PORT" not in environ:
        identity = "/".join(_identity(info, environ))
        digest = hashlib.sha256(identity.encode(errors="surrogateescape")).digest()
        return address, _FIRST_PORT + int.from_bytes(digest[:8]) % _PORTS
    text = environ["MASTER_PORT"]
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 2**16:
        problem = f"{text!r} is not a port number"
        raise ConfigError("MASTER_PORT", problem, "set the port to a number from 1 to 65535")
    return address, int(text)


def store_of_rank_zero(address: str, port: int, info: RankInfo, timeout: timedelta) -> Any:
    """Serve the ranks' `torch.distributed.Store` on rank 0, or connect to it on any other rank.

    Raises ConfigError on rank 0 if the address cannot be used, and LostRanksError on another rank
    if rank 0 does not answer in time.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    options: dict[str, Any] = {"is_master": info.rank == 0}
    if info.rank == 0:
        spans_nodes = info.local_world_size < info.world_size
        options["master_listen_fd"] = _listen(address, port, spans_nodes=spans_nodes).detach()
    else:
        own_address(address, port, f"rank {info.rank}", timeout)
    return TCPStore(
        address, port, info.world_size, timeout=timeout, wait_for_workers=False, **options
    )


def own_address(address: str, port: int, who: str, timeout: timedelta) -> str:
    """Wait until rank 0's server answers, and return this host's address on the route to it.

    The function tries the connection before torch does, because torch prints many lines if the
    connection fails. The error message begins with `who`. Raises LostRanksError if the server does
    not answer in time.
    """
    end = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            with socket.create_connection((address, port), timeout=1) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() > end:
                problem = f"cannot reach rank 0 at {address} port {port} ({error})"
                remedy = "check MASTER_ADDR, MASTER_PORT, the host names and the firewalls"
                raise LostRanksError(who, problem, remedy) from None
        time.sleep(_POLL_S)


def interface_of(address: str) -> str | None:
    """Return the network interface whose first IPv4 address is `address`, or None without one."""
    packed = ipaddress.ip_address(address.partition("%")[0]).packed
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if _ipv4_of(name) == packed), None)


def _ipv4_of(interface: str) -> bytes | None:
    """Return the four bytes of an interface's first IPv4 address, or None if it has none."""
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24]
        except OSError:
            return None


def first_host(node_list: str) -> str:
    """Return the first name of a SLURM host list, such as `gpu007` for `gpu[007-010,12],login`."""
    match = re.match(r"[^,\[]+(?:\[(\w+)[^\]]*\][^,\[]*)*", node_list)
    if match is None:
        problem = f"{node_list!r} is not a list of hosts"
        raise ConfigError("SLURM_STEP_NODELIST", problem, "set MASTER_ADDR to the host of rank 0")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def _listen(address: str, port: int, *, spans_nodes: bool) -> socket.socket:
    """Create a server socket that listens only on `address`. Raises ConfigError if that fails."""
    remedy = "set MASTER_ADDR to rank 0's address in the network that connects the nodes"
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        problem = f"{address!r} cannot be resolved ({error})"
        raise ConfigError("MASTER_ADDR", problem, remedy) from None
    problem = f"{address} is not an address of this host, which runs rank 0"
    for family, _, _, _, socket_address in found:
        numeric = ipaddress.ip_address(str(socket_address[0]).partition("%")[0])
        if numeric.is_unspecified or (
            spans_nodes and numeric.is_loopback and address != str(numeric)
        ):
            problem = (
                f"{address} is {numeric} on this host, an address that other nodes cannot reach"
            )
            continue
        try:
            return socket.create_server(socket_address, family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                problem = f"port {port} is already in use on {address}"
                other = "set MASTER_PORT to another port, or unset it"
                raise ConfigError("MASTER_PORT", problem, other) from None
    raise ConfigError("MASTER_ADDR", problem, remedy)


def _identity(info: RankInfo, environ: Mapping[str, str]) -> list[str]:
    """Return values that identify this start of the job on all ranks, or raise ConfigError."""
    if info.launcher == "slurm":
        return [environ.get(name, "") for name in _STEP]
    job = [environ[name] for name in _OPEN_MPI_JOB if name in environ][:1]
    if not job:
        problem = "the variable is not set, and this MPI sets no job ID to compute a port from"
        remedy = "set one port for all ranks, for example MASTER_PORT=$((20000 + RANDOM % 12000))"
        raise ConfigError("MASTER_PORT", problem, remedy)
    return job


def _default_address(info: RankInfo, environ: Mapping[str, str]) -> str:
    """Return the default host of rank 0. Raises ConfigError if the host is unknown."""
    if info.local_world_size == info.world_size:
        return "127.0.0.1"
    if info.launcher == "slurm":  # srun puts task 0 on the first node of the step
        return first_host(_text(environ, "SLURM_STEP_NODELIST"))
    problem = "the variable is not set, but the ranks run on several nodes"
    raise ConfigError("MASTER_ADDR", problem, "set MASTER_ADDR to the host of rank 0")


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
    return RankInfo(rank, world_size, local_rank, sizes[node], node, "slurm")


def _text(environ: Mapping[str, str], name: str) -> str:
    """Return the value of an environment variable. Raises ConfigError if it is not set."""
    if name not in environ:
        problem = "the variable is not set, although others of the same launcher are set"
        raise ConfigError(name, problem, "start ranks with the launcher, which sets this variable")
    return environ[name]


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    """Return an environment variable as an integer. Raises ConfigError unless it is at least 0."""
    text = _text(environ, name) if default is None else environ.get(name, default)
    if not re.fullmatch(r"[0-9]{1,12}", text.strip()):
        raise ConfigError(name, f"must be an integer of at least 0, not {text!r}", _SET_OR_UNSET)
    return int(text)


def _positive(name: str, text: str) -> int:
    """Return the number in a variable's `text`. Raises ConfigError unless it is above zero."""
    number = _number({name: text}, name)
    if number < 1:
        raise ConfigError(name, f"must be an integer above 0, not {text!r}", _SET_OR_UNSET)
    return number
