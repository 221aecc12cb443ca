"""Functions with which ranks find each other, join the process group, and leave it.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlperf_bert.distributed.launch import MEETING, VARIABLES, RankInfo, backend_for, text_of
from mlperf_bert.errors import ConfigError, LostRanksError, say
from mlperf_bert.files import in_brief

if TYPE_CHECKING:
    import torch

_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_FIRST_PORT, _PORTS = 20_000, 12_000  # below the kernel's ports for outgoing connections
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_OPEN_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_BACKLOG = 4096  # ranks that may connect at the same time
_POLL_S = 0.05
WAITING_S = 30.0  # how long rank 0 waits for other ranks before it says so
_SIOCGIFADDR = 0x8915  # Linux's request for the IPv4 address of an interface
_ANY_PORT = 9  # a UDP socket needs a port to find a route, but sends nothing
_BRIDGES = ("docker", "br-", "virbr")  # interfaces of containers and virtual machines on this host
_NAME_ADDRESS = "set MASTER_ADDR to rank 0's address in the network that connects the nodes"


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
    names_here = _interfaces()
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
    if backend == "nccl" and wanted and not wanted.startswith("^") and not _matching(wanted):
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
    seen = [name for name in VARIABLES if name in environ]

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
    the port is computed from values that identify this start of the job. On rank 0's own host, the
    host may be an address instead (`_reachable`). Raises ConfigError if the host or the port cannot
    be determined.
    """
    if info.launcher == "torchrun":
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environ:
                problem = "the variable is not set, although RANK is set"
                remedy = "start the ranks with torchrun, which sets MASTER_ADDR and MASTER_PORT"
                raise ConfigError(name, problem, remedy)
    address = environ.get("MASTER_ADDR") or _default_address(info, environ)
    if info.local_world_size < info.world_size:
        address = _reachable(address, info, environ)
    if "MASTER_PORT" not in environ:
        identity = "/".join(_identity(info, environ))
        digest = hashlib.sha256(identity.encode(errors="surrogateescape")).digest()
        return address, _FIRST_PORT + int.from_bytes(digest[:8]) % _PORTS
    text = environ["MASTER_PORT"]
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 2**16:
        problem = f"{text!r} is not a port number"
        raise ConfigError("MASTER_PORT", problem, "set the port to a number from 1 to 65535")
    return address, int(text)


def _reachable(address: str, info: RankInfo, environ: Mapping[str, str]) -> str:
    """Return `address`, or an address that other nodes can reach if it is a loopback address here.

    On Ubuntu, /etc/hosts gives a host's own name the address 127.0.1.1, also in containers that get
    this file from their host. Only ranks on rank 0's host see that address, and other nodes resolve
    the name to a real one. The function returns this host's address on the interface that the user
    has set for gloo or NCCL, or else on the route to the last node of the SLURM step, or else this
    host's only address. Rank 0 says which address it took. Raises ConfigError if there are several.
    """
    names = (socket.gethostname(), environ.get("SLURMD_NODENAME", ""))
    if address.partition(".")[0] not in [name.partition(".")[0] for name in names]:
        return address  # another host's name, or a number
    if not _is_loopback_here(address):
        return address
    own = {name: ip for name in _interfaces() if (ip := _text_of(_ipv4_of(name)))}
    own = {
        name: ip
        for name, ip in own.items()
        if not (name.startswith(_BRIDGES) or ipaddress.ip_address(ip).is_loopback)
    }
    chosen = _chosen_interface(environ)
    by_route = _own_address_to(last_host(environ.get("SLURM_STEP_NODELIST", "")))
    if chosen in own:
        found, why = own[chosen], f"the interface {chosen} is set"
    elif by_route is not None:
        found, why = by_route, "it is on the route to the other nodes"
    elif len(own) == 1:
        (found,) = own.values()
        why = "this host has no other address"
    elif info.launcher == "torchrun":
        return address  # torchrun's own store listens on all addresses
    else:
        there = ", ".join(f"{ip} ({name})" for name, ip in own.items()) or "none"
        problem = f"{address} is a loopback address on this host, whose other addresses are {there}"
        raise ConfigError("MASTER_ADDR", problem, _NAME_ADDRESS)
    if info.rank == 0:
        others = ", ".join(f"{ip} ({name})" for name, ip in own.items() if ip != found)
        more = f"; other addresses of this host: {others}" if others else ""
        say(f"ranks meet at {found}, because {address} is a loopback address here and {why}{more}")
    return found


def _is_loopback_here(address: str) -> bool:
    """Return True if this host resolves a name to loopback addresses only."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    numbers = (ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found)
    return all(number.is_loopback for number in numbers)


def _chosen_interface(environ: Mapping[str, str]) -> str | None:
    """Return the first interface that the user has set for gloo, or for NCCL, or None."""
    for name in environ.get(_GLOO_INTERFACE, "").split(","):
        if name:
            return name
    wanted = environ.get(_NCCL_INTERFACE, "")
    return None if not wanted or wanted.startswith("^") else next(iter(_matching(wanted)), None)


def _matching(wanted: str) -> list[str]:
    """Return this host's interfaces that fit NCCL's list of prefixes, or of names after `=`."""
    fits = str.__eq__ if wanted.startswith("=") else str.startswith
    names = wanted.removeprefix("=").split(",")
    return [each for each in _interfaces() if any(fits(each, name) for name in names)]


def _own_address_to(other: str) -> str | None:
    """Return this host's IPv4 address on the route to another host, unless it is loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, _ANY_PORT))  # chooses a route, and sends nothing
            found = str(probe.getsockname()[0])
        except (OSError, ValueError):
            return None
    return None if not other or ipaddress.ip_address(found).is_loopback else found


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _text_of(packed: bytes | None) -> str | None:
    return None if packed is None else socket.inet_ntoa(packed)


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
    return next((name for name in _interfaces() if _ipv4_of(name) == packed), None)


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


def last_host(node_list: str) -> str:
    """Return the last name of a SLURM host list, such as `gpu012` for `gpu[007-010,012]`."""
    last = re.split(r",(?![^\[]*\])", node_list)[-1]
    return re.sub(r"\[[^\]]*?(\w+)\]", r"\1", last)


def _listen(address: str, port: int, *, spans_nodes: bool) -> socket.socket:
    """Create a server socket that listens only on `address`. Raises ConfigError if that fails."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        problem = f"{address!r} cannot be resolved ({error})"
        raise ConfigError("MASTER_ADDR", problem, _NAME_ADDRESS) from None
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
    raise ConfigError("MASTER_ADDR", problem, _NAME_ADDRESS)


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
        return first_host(text_of(environ, "SLURM_STEP_NODELIST"))
    problem = "the variable is not set, but the ranks run on several nodes"
    raise ConfigError("MASTER_ADDR", problem, "set MASTER_ADDR to the host of rank 0")


def record_nccl(path: Path) -> None:
    """Let NCCL write to a file which network it uses, unless the user lets it print that.

    Call this function before the process joins the group.
    """
    if os.environ.get("NCCL_DEBUG", "").upper() not in ("INFO", "TRACE"):
        os.environ |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET",
            "NCCL_DEBUG_FILE": str(path),
        }


def transport(backend: str, nccl_log: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return what ranks communicate over, for example "nccl over IB (mlx5_0, mlx5_1)".

    `nccl_log` is the text that NCCL wrote (`record_nccl`), or "" if there is none.
    """
    if backend == "gloo":
        return f"gloo over {environ.get(_GLOO_INTERFACE) or 'the loopback interface'}"
    used = re.findall(r"NET/(\w+) : Using (\[.*)", nccl_log)
    if not used:
        return f"{backend} over an unknown network"
    # NCCL lists its sockets too if it sends the data over InfiniBand.
    name, adapters = next((each for each in used if each[0] != "Socket"), used[0])
    names = ", ".join(re.findall(r"\[\d+\] ?([A-Za-z][\w.-]*)", adapters))
    direct = ", directly from GPU memory" if "GDRDMA" in nccl_log else ""
    return f"{backend} over {name} ({names}){direct}"
