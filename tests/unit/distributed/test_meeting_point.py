"""Where ranks meet: rank 0's address, a port of their own, a store that listens there alone."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from test_launch import BATCH_SHELL, HYDRA, OPEN_MPI, STEP, TORCHRUN

from forked_ranks import free_port
from listening import listeners
from mlperf_bert.common.errors import ConfigError, LostRanksError
from mlperf_bert.distributed import meeting_point
from mlperf_bert.distributed.launch import RankInfo, read_rank_info
from mlperf_bert.distributed.meeting_point import rendezvous, store_of_rank_zero

PORT = {"MASTER_PORT": "4000"}
ON_ONE_NODE = {"MPI_LOCALNRANKS": "4"}
OF_A_JOB = {**OPEN_MPI, "MASTER_ADDR": "host", "PMIX_NAMESPACE": "prte@1"}
PATIENCE = timedelta(seconds=10)


def port(environ: dict[str, str]) -> int:
    return rendezvous(read_rank_info(environ), environ)[1]


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        ({**TORCHRUN, "MASTER_ADDR": "host"}, "host"),
        ({**HYDRA, **ON_ONE_NODE}, "127.0.0.1"),
        ({**HYDRA, "MASTER_ADDR": "fe80::1"}, "fe80::1"),
        ({**BATCH_SHELL, **HYDRA, "SLURM_STEP_NODELIST": "gpu008"}, "gpu007"),
        (STEP, "gpu007"),
        ({**STEP, "SLURM_STEP_NODELIST": "gpu008,x"}, "gpu008"),
    ],
)
def test_ranks_agree_where_to_meet(environ: dict[str, str], host: str) -> None:
    environ = {**environ, **PORT}
    assert rendezvous(read_rank_info(environ), environ) == (host, 4000)


def test_launch_node_address_is_the_last_resort() -> None:
    environ = {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"}
    assert rendezvous(read_rank_info(STEP), environ)[0] == "10.0.0.7"


@pytest.mark.parametrize(
    ("environ", "other"),
    [
        (STEP, {"SLURM_STEP_ID": "1"}),
        (STEP, {"SLURM_JOB_ID": "12346"}),
        (STEP, {"SLURM_RESTART_COUNT": "1"}),
        (OF_A_JOB, {"PMIX_NAMESPACE": "prte@2"}),
        ({**OPEN_MPI, "MASTER_ADDR": "h", "OMPI_MCA_ess_base_jobid": "7"}, {"PMIX_NAMESPACE": "8"}),
        ({**BATCH_SHELL, **HYDRA}, {"SLURM_JOB_ID": "12346"}),
    ],
)
def test_every_start_has_a_port_of_its_own(environ: dict[str, str], other: dict[str, str]) -> None:
    assert 20_000 <= port(environ) < 32_000
    assert port(environ) == port({**environ, "HOSTNAME": "another", "PPID": "2"})
    assert port(environ) != port({**environ, **other})


def test_ranks_of_one_mpiexec_agree_also_behind_shells() -> None:
    """hydra names no job: who started all ranks is the nearest ancestor that is none of them."""
    code = (
        "import os, types; from mlperf_bert.distributed.meeting_point import rendezvous; "
        "two = types.SimpleNamespace(launcher=0, world_size=2, local_world_size=2); "
        "port = rendezvous(two, os.environ)[1]; "
        "os.write(1, str(port).encode() + bytes([10]))"  # in one piece: both write there
    )
    program = f"{sys.executable} -c '{code}'"
    rank = "PMI_RANK={0} PMI_SIZE=2 MPI_LOCALRANKID={0} MPI_LOCALNRANKS=2"
    script = f'{rank.format(0)} {program} & {rank.format(1)} sh -c "true; {program}" & wait'
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER"))}
    starts = [
        subprocess.run(
            ["sh", "-c", script],
            env={**environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    (one, also_one), (another, also_another) = starts
    assert one == also_one != another == also_another


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (TORCHRUN, "MASTER_ADDR"),
        ({**TORCHRUN, "MASTER_ADDR": "host"}, "MASTER_PORT"),
        (HYDRA, "MASTER_ADDR"),
        ({**HYDRA, "MASTER_ADDR": "host"}, "MASTER_PORT"),
        ({**HYDRA, "MASTER_ADDR": "host", "MASTER_PORT": "70000"}, "MASTER_PORT"),
        ({**HYDRA, "MASTER_ADDR": "host", "MASTER_PORT": "0"}, "MASTER_PORT"),
        ({**HYDRA, "MASTER_ADDR": "host", "MASTER_PORT": "x"}, "MASTER_PORT"),
    ],
)
def test_a_missing_meeting_point_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}:"):
        rendezvous(read_rank_info(environ), environ)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("gpu007", "gpu007"),
        ("gpu007,gpu008", "gpu007"),
        ("gpu[007-010,12],login", "gpu007"),
        ("rack[2,4]node[08-09]", "rack2node08"),
        ("a-b.example.org,c[1-2]", "a-b.example.org"),
        ("n[1-2]-ib,x", "n1-ib"),
    ],
)
def test_first_host_of_a_slurm_list(node_list: str, host: str) -> None:
    assert meeting_point.first_host(node_list) == host


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.3", "localhost"])
def test_the_store_listens_on_its_address_alone(address: str) -> None:
    number = int(free_port())
    before = set(listeners([os.getpid()]))
    with ThreadPoolExecutor() as pool:  # rank 1 comes first and waits
        client = pool.submit(
            store_of_rank_zero, address, number, RankInfo(1, 2, 1, 2, 0, "mpi"), PATIENCE
        )
        store = store_of_rank_zero(address, number, RankInfo(0, 2, 0, 2, 0, "mpi"), PATIENCE)
        client.result().set("key", "value")
    assert store.get("key") == b"value"
    shown = f"{socket.gethostbyname(address)}:{number}"
    assert set(listeners([os.getpid()])) - before <= {shown, f"::1:{number}"} != set()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1", "MASTER_PORT: .* is taken on 127.0.0.1"),
        ("192.0.2.77", "MASTER_ADDR: 192.0.2.77 is no address of this host"),
        ("0.0.0.0", "MASTER_ADDR: 0.0.0.0 is 0.0.0.0 here, which other nodes do not reach"),
        ("localhost", r"MASTER_ADDR: localhost is \S+ here, which other nodes do not reach"),
        ("no.such.host.invalid", "MASTER_ADDR: 'no.such.host.invalid' is not known"),
    ],
)
def test_where_rank_zero_cannot_listen_is_one_line(address: str, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=message):
            store_of_rank_zero(address, number, RankInfo(0, 2, 0, 1, 0, "mpi"), PATIENCE)


def test_a_rank_zero_that_never_comes_is_one_line() -> None:
    number = int(free_port())
    with pytest.raises(LostRanksError, match=f"rank 1: cannot reach rank 0 .* port {number}"):
        store_of_rank_zero(
            "127.0.0.1", number, RankInfo(1, 2, 1, 2, 0, "mpi"), timedelta(seconds=0.2)
        )


def test_interfaces_are_found_by_their_address() -> None:
    assert meeting_point.interface_of("127.0.0.1") == "lo"
    assert meeting_point.interface_of("192.0.2.77") is None
    assert meeting_point.interface_of("2001:db8::77") is None
