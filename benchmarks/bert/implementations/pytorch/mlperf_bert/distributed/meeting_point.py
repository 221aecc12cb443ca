"""Where ranks meet: in a file, on one host; else at a store that rank 0 serves on one address.

torch's own store listens on every interface, and takes and gives to whoever comes.
"""

import errno
import fcntl
import hashlib
import ipaddress
import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlperf_bert.common.errors import ConfigError, LostRanksError

if TYPE_CHECKING:
    from mlperf_bert.distributed.launch import RankInfo

_FIRST_PORT, _PORTS = 20_000, 12_000  # below those that the kernel gives to connections
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_OPEN_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_RANK_OF_MPI = (b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=")
_BACKLOG = 4096  # ranks that come at the same time
_POLL_S = 0.05
_SIOCGIFADDR = 0x8915  # of Linux: an interface's IPv4 address


def rendezvous(info: "RankInfo", environ: Mapping[str, str]) -> tuple[str, int]:
    """The host of rank 0, and the port there: MASTER_ADDR and MASTER_PORT where they are set.

    Else the first node, and a port that follows from what tells this start from all others. Raises
    ConfigError where host or port cannot be told.
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


def store_of_rank_zero(address: str, port: int, info: "RankInfo", timeout: timedelta) -> Any:
    """Serve the ranks' `torch.distributed.Store` on rank 0, and reach it on the others.

    Raises ConfigError on rank 0 where it cannot listen there; LostRanksError on another where rank
    0 does not answer in time.
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


def file_store(path: str, timeout: timedelta) -> Any:
    """The ranks' store in a file that our launcher has made for them, and removes."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    store = FileStore(path)
    store.set_timeout(timeout)
    return store


def own_address(address: str, port: int, who: str, timeout: timedelta) -> str:
    """This host's address on the way to who listens there, once that answers.

    Asked here because torch prints many lines of a failure. Raises LostRanksError where nobody
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
    """The network interface that has `address`; None where it is another than its first one."""
    packed = ipaddress.ip_address(address.partition("%")[0]).packed
    if len(packed) == 16:
        table = Path("/proc/net/if_inet6")
        lines = table.read_text().split("\n") if table.exists() else []
        return next((line.split()[-1] for line in lines if line.startswith(packed.hex())), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            if answer[20:24] == packed:
                return name
    return None


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
            problem = f"{address} is {numeric} here, which other nodes do not reach"
            continue
        try:
            return socket.create_server(place, family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                other = "set another, or leave it out"
                raise ConfigError("MASTER_PORT", f"{port} is taken on {address}", other) from None
    raise ConfigError("MASTER_ADDR", problem, remedy)


def _identity(info: "RankInfo", environ: Mapping[str, str]) -> list[str]:
    """What all ranks of this start know, and those of no other start. Raises ConfigError."""
    if info.launcher == "slurm":
        return [environ.get(name, "") for name in _STEP]
    job = [environ[name] for name in _OPEN_MPI_JOB if name in environ][:1]
    if not job and info.local_world_size == info.world_size and (launcher := _launcher_pid()):
        job = [str(launcher)]
    if not job and "SLURM_JOB_ID" in environ:
        job = [environ[_STEP[0]], environ.get(_STEP[2], "")]
    if not job:
        remedy = "set it for all ranks, for instance: MASTER_PORT=$((20000 + RANDOM % 12000))"
        raise ConfigError("MASTER_PORT", "is not set, and this MPI does not name its job", remedy)
    return job


def _launcher_pid() -> int | None:
    """The nearest ancestor that is no rank, nor a shell of one: it has started all of this host.

    hydra's `mpiexec` gives its ranks nothing else that is theirs alone.
    """
    pid = os.getppid()
    try:
        while pid > 1:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if not any(variable.startswith(_RANK_OF_MPI) for variable in variables):
                return pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # another user's, or hidden
        pass
    return None


def _default_address(info: "RankInfo", environ: Mapping[str, str]) -> str:
    if info.local_world_size == info.world_size:
        return "127.0.0.1"
    # srun puts task 0 on the first node of the step. mpirun's ranks know the job's list only, or
    # would disagree: its remote daemons are a step of their own, without the first node.
    names = ["SLURM_JOB_NODELIST", "SLURM_NODELIST"]
    if info.launcher == "slurm":
        names = ["SLURM_STEP_NODELIST", *reversed(names)]
    for name in names:
        if environ.get(name):
            return first_host(environ[name])
    # Last, because srun may have been typed on a login node, where no rank runs.
    if environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        return environ["SLURM_LAUNCH_NODE_IPADDR"]
    raise ConfigError(
        "MASTER_ADDR", "is not set and the ranks span nodes", "set it to rank 0's host"
    )


def first_host(node_list: str) -> str:
    """The first name of a SLURM host list: `gpu[007-010,12],login` gives `gpu007`."""
    match = re.match(r"[^,\[]+(?:\[(\w+)[^\]]*\][^,\[]*)*", node_list)
    if match is None:
        raise ConfigError("SLURM_NODELIST", f"is {node_list!r}", "set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])
