"""Start of a rank: its number, the meeting place of the ranks, and the process group.

On one host ranks meet in a file, else at a store that rank 0 serves on one address: torch's own
store listens on every interface and answers anyone.

Environment variables are an argument, so that tests pass a dictionary. torch is imported where it
is used, because a process that only starts ranks does not need it.
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
import sysconfig
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

Launcher = Literal["local", "torchrun", "mpi", "slurm", "single"]  # local: our own, spawn.py
MEETING = "MLPERF_BERT_MEETING"  # the file where ranks of our own launcher meet
_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_FIRST_PORT, _PORTS = 20_000, 12_000  # below those that the kernel gives to outgoing connections
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_OPEN_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
# Variables of the rank, the number of ranks, and the same on its node.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = tuple(
    f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PALS = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")  # Polaris, Aurora
_SLURM = tuple(f"SLURM_{n}" for n in ("PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID"))
_TASKS = "SLURM_STEP_TASKS_PER_NODE"
# Launchers that do not tell all that is needed: rank, and number of ranks.
_OTHERS = (
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("PALS_RANKID", "PALS_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
)
_PACKAGES = ("torch", "numpy", "numba", "h5py", "safetensors", "mlperf_logging", "scipy", "rich")
_BACKLOG = 4096  # ranks that arrive at the same time
_POLL_S = 0.05
WAITING_S = 30.0  # for other ranks, before a word
_SIOCGIFADDR = 0x8915  # of Linux: an interface's IPv4 address


@dataclass(frozen=True)
class RankInfo:
    """This process among all (`rank` of `world_size`) and among those of its node."""

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
                f"{self.local_world_size}, node {self.node_rank} contradict each other",
                "start all ranks with one launcher, or unset left-over variables",
            )


def read_rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Read the rank from our, torchrun's, MPI's or SLURM's variables, in this order; else one rank.

    torchrun comes early because it may itself be started by MPI or srun, once a node; MPI before
    SLURM because mpirun in a SLURM job leaves SLURM's variables of the outer process behind.

    SLURM counts only inside an srun step. The shell of an sbatch script also has SLURM_PROCID=0
    and SLURM_NTASKS=n, though it is one process: SLURM_STEP_ID tells them apart. The size is that
    of the step (an interactive shell is a step of one task), not of the job.

    Half of a launcher's variables is enough for one rank alone. Raises ConfigError for more ranks,
    which says what was seen and what is missing, and for a variable that is not a number.
    """
    environ = {name: value for name, value in environ.items() if value}
    in_slurm_step = "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ
    # srun --mpi=pmi2 sets PMI_RANK too, but not hydra's local rank: that is a SLURM launch.
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
    return _from_half(environ, launcher, of_pmi if by_pmi else None, in_slurm_step=in_slurm_step)


def _from_half(
    environ: Mapping[str, str],
    launcher: Launcher,
    of_pmi: Sequence[str] | None,
    *,
    in_slurm_step: bool,
) -> RankInfo:
    """The rank where no launcher has set all that is needed: one alone, or ConfigError.

    torchrun's variables come last, since scripts on clusters often set WORLD_SIZE.
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
            raise _half(environ, names, _TORCHRUN)
    return RankInfo(0, 1, 0, 1, 0, "single")


def shadowed_packages(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Directories of PYTHONPATH with a package that the environment has too, and its name.

    Modules of a cluster often set it; Python then takes theirs in place of the environment's.
    """
    own = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    needed = [name for name in _PACKAGES if any(_has_package(each, name) for each in own)]
    return [
        (directory, name)
        for directory in environ.get("PYTHONPATH", "").split(os.pathsep)
        for name in needed
        if directory and os.path.realpath(directory) not in own and _has_package(directory, name)
    ]


def _has_package(directory: str, name: str) -> bool:
    files = (f"{name}.py", f"{name}/__init__.py")
    return any(os.path.exists(os.path.join(directory, file)) for file in files)


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """The node's name: SLURM's, because several of its nodes may be one host, or the host's."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def choose_device(
    name: Literal["auto", "cpu", "cuda"],
    info: RankInfo,
    share_gpu: Literal["refuse", "allow"] = "refuse",
) -> "torch.device":
    """The device of this rank: `cuda:<local_rank>` or `cpu`; `auto` takes CUDA if present.

    Raises ConfigError for `cuda` without CUDA, and for more ranks on the node than GPUs unless
    they may share.
    """
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("run.device", "is 'cuda' but no CUDA device is usable", "use 'cpu'")
    gpus = torch.cuda.device_count()
    if info.local_world_size > gpus and share_gpu == "refuse":
        raise ConfigError(
            "run.device",
            f"{info.local_world_size} ranks on this node see {gpus} GPUs",
            "start one rank a GPU and let each see all (srun: --gpus-per-node, not per task)",
        )
    return torch.device("cuda", info.local_rank % gpus)


def set_cpu_threads(info: RankInfo, environ: Mapping[str, str] = os.environ) -> int:
    """Give this rank its share of the node's cores, as torch CPU threads; return their number.

    The first of these counts: OMP_NUM_THREADS (not under torchrun, which sets it to 1 by itself);
    SLURM_CPUS_PER_TASK in an srun step; the cores this process may run on divided by the ranks of
    the node. Raises ConfigError if a variable is not a number above zero.
    """
    import torch

    if info.launcher != "torchrun" and "OMP_NUM_THREADS" in environ:
        # OpenMP allows one number for each nesting level; the outermost counts.
        outermost = environ["OMP_NUM_THREADS"].split(",")[0]
        threads = _positive("OMP_NUM_THREADS", outermost)
    elif info.launcher == "slurm" and "SLURM_CPUS_PER_TASK" in environ:
        threads = _positive("SLURM_CPUS_PER_TASK", environ["SLURM_CPUS_PER_TASK"])
    else:
        threads = max(1, len(usable_cpus()) // info.local_world_size)
    torch.set_num_threads(threads)
    return threads


def backend_for(info: RankInfo, device: "torch.device") -> Literal["nccl", "gloo"]:
    """The backend for ranks on `device`'s kind; nccl needs a GPU for each of them."""
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
    """Make `device` current and join the other ranks over `backend_for`.

    One rank alone gets no process group: code that communicates must ask for world_size > 1.
    `timeout` bounds the start and every later collective. Raises ConfigError if rank 0's address is
    not known, or if torchrun is to restart ranks by itself.
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
    """Raise ConfigError if the user names network interfaces that no rank can use.

    gloo, which also connects the ranks of a group over NCCL, takes names; NCCL beginnings of names,
    or after `=` names, and after `^` those to leave out.
    """
    there = [name for _, name in socket.if_nameindex()]
    has = f"this host has {', '.join(there)}"
    for name in filter(None, environ.get(_GLOO_INTERFACE, "").split(",")):
        if name not in there and _ipv4_of(name) is None:  # a label such as eth0:1 is none there
            problem = f"is {in_brief(name)}, and no interface has that name"
            raise ConfigError(_GLOO_INTERFACE, problem, f"{has}: set it to one, or unset it")
        if not has_address(name):
            problem = f"is {name}, which has no address"
            remedy = f"bring it up (ip link set {name} up), or set it to another; {has}"
            raise ConfigError(_GLOO_INTERFACE, problem, remedy)
    wanted = environ.get(_NCCL_INTERFACE, "")
    if backend == "nccl" and wanted and not wanted.startswith("^"):
        names = wanted.removeprefix("=").split(",")
        fits = str.__eq__ if wanted.startswith("=") else str.startswith
        if not any(fits(each, name) for each in there for name in names):
            problem = f"is {in_brief(wanted)}, and no interface is called so"
            raise ConfigError(_NCCL_INTERFACE, problem, f"{has}: set it to one, or unset it")


def has_address(interface: str) -> bool:
    """True if a network interface has an IPv4 or IPv6 address; elsewhere than on Linux always."""
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
    # Restarted ranks get the old store, with addresses of processes that are gone (torch 2.13).
    name = "TORCHELASTIC_MAX_RESTARTS"
    if environ.get(name, "0") != "0":
        remedy = "start torchrun without --max-restarts, and again with --resume auto after a crash"
        raise ConfigError(name, f"is {environ[name]!r}", remedy)


@contextmanager
def naming_the_awaited(
    info: RankInfo, environ: Mapping[str, str] = os.environ, after_s: float = WAITING_S
) -> Iterator[None]:
    """Say on rank 0, if it waits so long for other ranks, which variables promise them.

    They may be left over in a shell or a container, from a job that has ended.
    """
    known = (*_TORCHRUN[:2], *_OPEN_MPI[:2], *_HYDRA[:2], "SLURM_STEP_ID", "SLURM_PROCID")
    seen = [name for name in known if name in environ]

    def tell() -> None:
        others = f"{info.world_size - 1:,} other ranks, as {' and '.join(seen)} say"
        say(f"waiting for {others}; if this process is alone, unset them")

    timer = threading.Timer(after_s, tell)
    timer.daemon = True
    if info.rank == 0 and info.world_size > 1 and info.launcher != "local":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def shutdown() -> None:
    """Leave the process group, if this process is in one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def open_store(info: RankInfo, timeout: timedelta, environ: Mapping[str, str] = os.environ) -> Any:
    """The `torch.distributed.Store` of this start: our launcher's, torchrun's or rank 0's.

    Over several hosts gloo uses the interface that leads to rank 0, unless the user names one.
    Raises ConfigError if the store's address is unknown or cannot be used; LostRanksError if it
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
    """The host of rank 0, and the port there: MASTER_ADDR and MASTER_PORT if they are set.

    Else the first node, and a port computed from what identifies this start. Raises ConfigError if
    host or port cannot be determined.
    """
    if info.launcher == "torchrun":
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environ:
                raise ConfigError(name, "is not set beside RANK", "start the ranks with torchrun")
    address = environ.get("MASTER_ADDR") or _default_address(info, environ)
    if "MASTER_PORT" not in environ:
        identity = "/".join(_identity(info, environ))
        digest = hashlib.sha256(identity.encode(errors="surrogateescape")).digest()
        return address, _FIRST_PORT + int.from_bytes(digest[:8]) % _PORTS
    text = environ["MASTER_PORT"]
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 2**16:
        raise ConfigError("MASTER_PORT", f"is {text!r}", "set it to a number of 1 to 65535")
    return address, int(text)


def store_of_rank_zero(address: str, port: int, info: RankInfo, timeout: timedelta) -> Any:
    """Serve the ranks' `torch.distributed.Store` on rank 0, and reach it on the others.

    Raises ConfigError on rank 0 if it cannot listen there; LostRanksError on the others if rank 0
    does not answer in time.
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
    """This host's address on the route to the listener there, once that answers.

    It is tried here because torch prints many lines at a failure. Raises LostRanksError if nobody
    answers in time.
    """
    end = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            with socket.create_connection((address, port), timeout=1) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() > end:
                problem = f"cannot reach rank 0 at {address} port {port} ({error})"
                remedy = "check MASTER_ADDR and MASTER_PORT, names of hosts and firewalls"
                raise LostRanksError(who, problem, remedy) from None
        time.sleep(_POLL_S)


def interface_of(address: str) -> str | None:
    """The network interface whose first IPv4 address is `address`; None if there is none."""
    packed = ipaddress.ip_address(address.partition("%")[0]).packed
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if _ipv4_of(name) == packed), None)


def _ipv4_of(interface: str) -> bytes | None:
    """The four bytes of an interface's first IPv4 address; None if it has none."""
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24]
        except OSError:
            return None


def first_host(node_list: str) -> str:
    """The first name of a SLURM host list: `gpu[007-010,12],login` gives `gpu007`."""
    match = re.match(r"[^,\[]+(?:\[(\w+)[^\]]*\][^,\[]*)*", node_list)
    if match is None:
        raise ConfigError("SLURM_STEP_NODELIST", f"is {node_list!r}", "set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def _listen(address: str, port: int, *, spans_nodes: bool) -> socket.socket:
    """A socket that listens on that address alone. Raises ConfigError."""
    remedy = "set it to rank 0's address on the network of the nodes"
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError("MASTER_ADDR", f"{address!r} is not known ({error})", remedy) from None
    problem = f"{address} is no address of this host, where rank 0 runs"
    for family, _, _, _, place in found:
        numeric = ipaddress.ip_address(str(place[0]).partition("%")[0])
        if numeric.is_unspecified or (
            spans_nodes and numeric.is_loopback and address != str(numeric)
        ):
            problem = f"{address} is {numeric} here, which other nodes cannot reach"
            continue
        try:
            return socket.create_server(place, family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                other = "set another, or leave it out"
                raise ConfigError("MASTER_PORT", f"{port} is taken on {address}", other) from None
    raise ConfigError("MASTER_ADDR", problem, remedy)


def _identity(info: RankInfo, environ: Mapping[str, str]) -> list[str]:
    """Values that all ranks of this start share, and no other start has. Raises ConfigError."""
    if info.launcher == "slurm":
        return [environ.get(name, "") for name in _STEP]
    job = [environ[name] for name in _OPEN_MPI_JOB if name in environ][:1]
    if not job:
        remedy = "set it for all ranks, for instance: MASTER_PORT=$((20000 + RANDOM % 12000))"
        raise ConfigError("MASTER_PORT", "is not set, and this MPI does not name its job", remedy)
    return job


def _default_address(info: RankInfo, environ: Mapping[str, str]) -> str:
    if info.local_world_size == info.world_size:
        return "127.0.0.1"
    if info.launcher == "slurm":  # srun puts task 0 on the first node of the step
        return first_host(_text(environ, "SLURM_STEP_NODELIST"))
    raise ConfigError(
        "MASTER_ADDR", "is not set and the ranks span nodes", "set it to rank 0's host"
    )


def _from_names(
    environ: Mapping[str, str], launcher: Launcher, names: Sequence[str], node: str = ""
) -> RankInfo:
    """Info from the variables of rank, size, local rank and local size; `node` is the node's."""
    rank, size, local_rank, local_size = names
    if not all(name in environ for name in names):
        if _is_alone(environ, rank, size):
            return RankInfo(0, 1, 0, 1, 0, "single")
        raise _half(environ, names, names)
    on_node = _positive(local_size, environ[local_size])
    own, of, local = (_number(environ, name) for name in (rank, size, local_rank))
    # MPI does not name the node; ranks are placed node by node unless the user says otherwise.
    node_rank = _number(environ, node) if node in environ else own // on_node
    return RankInfo(own, of, local, on_node, node_rank, launcher)


def _is_alone(environ: Mapping[str, str], rank: str, size: str) -> bool:
    """True if a launcher says that this process is the only one."""
    return _number(environ, size, "0") == 1 and _number(environ, rank, "0") == 0


def _half(environ: Mapping[str, str], names: Sequence[str], wanted: Sequence[str]) -> ConfigError:
    """The error for a launcher of which these names, but not all those wanted, are set."""
    seen = [name for name in names if name in environ]
    missing = [name for name in wanted if name not in environ]
    values = " and ".join(f"{name}={in_brief(environ[name])}" for name in seen)
    return ConfigError(
        "launcher",
        f"{values} {'is' if len(seen) == 1 else 'are'} set, {', '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not",
        f"start all ranks by torchrun, srun or mpiexec, which set them, or set them; to run this "
        f"process alone, unset {' '.join(seen)}",
    )


def _from_slurm(environ: Mapping[str, str]) -> RankInfo:
    # SLURM writes runs of equal nodes as `8(x2),4`: two nodes of 8 tasks, one of 4.
    if not all(each in environ for each in (*_SLURM, _TASKS)):
        if _is_alone(environ, _SLURM[0], _SLURM[1]):
            return RankInfo(0, 1, 0, 1, 0, "single")
        raise _half(environ, ("SLURM_STEP_ID", *_SLURM, _TASKS), (*_SLURM, _TASKS))
    rank, world_size, local_rank, node = (_number(environ, each) for each in _SLURM)
    sizes: list[int] = []
    for part in environ[_TASKS].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(_TASKS, f"is {environ[_TASKS]!r}", "expected numbers such as 8(x2),4")
        sizes += [int(match[1])] * int(match[2] or 1)
    if node >= len(sizes):
        raise ConfigError(_TASKS, f"{environ[_TASKS]!r} has no node {node}", "check SLURM_NODEID")
    return RankInfo(rank, world_size, local_rank, sizes[node], node, "slurm")


def _text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise ConfigError(name, "is not set although its launcher is", "start with the launcher")
    return environ[name]


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = _text(environ, name) if default is None else environ.get(name, default)
    if not re.fullmatch(r"[0-9]{1,12}", text.strip()):
        raise ConfigError(name, f"is {text!r}", "it must be a number of at least 0")
    return int(text)


def _positive(name: str, text: str) -> int:
    """The number in a variable. Raises ConfigError unless it is above zero."""
    number = _number({name: text}, name)
    if number < 1:
        raise ConfigError(name, f"is {text!r}", "it must be a number above 0")
    return number
