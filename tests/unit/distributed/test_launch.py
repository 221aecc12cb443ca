"""Ranks and reader roles from launchers' variables, where ranks meet, devices and threads."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from forked_ranks import free_port
from listening import listeners
from mlperf_bert.distributed import launch
from mlperf_bert.distributed import rendezvous as meeting
from mlperf_bert.distributed.launch import (
    RankInfo,
    choose_device,
    read_rank_info,
    set_cpu_threads,
)
from mlperf_bert.distributed.reader_roles import role_of
from mlperf_bert.distributed.rendezvous import rendezvous, store_of_rank_zero
from mlperf_bert.errors import ConfigError, LostRanksError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
LOCAL = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
LOCAL[launch.MEETING] = "/x/store"
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
BATCH_SHELL = {
    "SLURM_JOB_ID": "12345",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
OF_THE_TASK = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
STEP = {
    **BATCH_SHELL,
    **OF_THE_TASK,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}
INTERACTIVE_SHELL = {
    **BATCH_SHELL,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
GLOO = "GLOO_SOCKET_IFNAME"
ALONE = RankInfo(0, 1, 0, 1, 0, "single")
RANKS = [RankInfo(rank, 2, rank, 2, 0, "mpi") for rank in range(2)]
PORT = {"MASTER_PORT": "4000"}
ON_ONE_NODE = {"MPI_LOCALNRANKS": "4"}
OF_A_JOB = {**OPEN_MPI, "MASTER_ADDR": "host", "PMIX_NAMESPACE": "prte@1"}
PATIENCE = timedelta(seconds=20)


def meeting_point(environ):
    return rendezvous(read_rank_info(environ), environ)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ALONE),
        (TORCHRUN, RankInfo(3, 4, 1, 2, 1, "torchrun")),
        ({**TORCHRUN, "GROUP_RANK": "5"}, RankInfo(3, 4, 1, 2, 5, "torchrun")),
        ({**STEP, **LOCAL}, RankInfo(1, 2, 1, 2, 0, "local")),
        (HYDRA, RankInfo(3, 4, 1, 2, 1, "mpi")),
        (OPEN_MPI, RankInfo(3, 4, 1, 2, 1, "mpi")),
        (BATCH_SHELL, ALONE),
        (STEP, RankInfo(9, 12, 1, 4, 1, "slurm")),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "6(x2)"}, RankInfo(9, 12, 1, 6, 1, "slurm")),
        ({**STEP, "PMI_RANK": "9", "PMI_SIZE": "12"}, RankInfo(9, 12, 1, 4, 1, "slurm")),
        ({**STEP, **HYDRA}, RankInfo(3, 4, 1, 2, 1, "mpi")),
        ({**STEP, **OPEN_MPI, **TORCHRUN}, RankInfo(3, 4, 1, 2, 1, "torchrun")),
        (INTERACTIVE_SHELL, ALONE),
    ],
)
def test_rank_is_read_from_each_launcher(environ, expected):
    assert read_rank_info(environ) == expected


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({**TORCHRUN, "RANK": "three"}, "RANK"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "4"}, "torchrun environment"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "-1"}, "OMPI_COMM_WORLD_LOCAL_RANK"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1e1"}, "SLURM_STEP_NUM_TASKS"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "8(2)"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "12"}, "SLURM_STEP_TASKS_PER_NODE"),
        (TORCHRUN, "MASTER_ADDR"),
        ({**TORCHRUN, "MASTER_ADDR": "host"}, "MASTER_PORT"),
        (HYDRA, "MASTER_ADDR"),
        ({**HYDRA, **ON_ONE_NODE}, "MASTER_PORT"),  # hydra names no job
        ({**BATCH_SHELL, **HYDRA, **PORT}, "MASTER_ADDR"),  # the step's nodes may be others
        ({**HYDRA, "MASTER_ADDR": "host", "MASTER_PORT": "70000"}, "MASTER_PORT"),
        ({**HYDRA, "MASTER_ADDR": "host", "MASTER_PORT": "0"}, "MASTER_PORT"),
        ({**HYDRA, "MASTER_ADDR": "host", "MASTER_PORT": "x"}, "MASTER_PORT"),
    ],
)
def test_a_missing_or_bad_variable_is_named(environ, named):
    with pytest.raises(ConfigError, match=f"^{named}:"):
        meeting_point(environ)


@pytest.mark.parametrize(("of_the_user", "chosen"), [({}, "lo"), ({GLOO: "lo"}, "eth7")])
def test_a_group_is_joined_over_the_interface_to_rank_zero(of_the_user, chosen, monkeypatch):
    seen = {}
    monkeypatch.setattr(dist, "init_process_group", lambda **options: seen.update(options))
    monkeypatch.setattr(meeting, "store_of_rank_zero", lambda *where: where)
    monkeypatch.setattr(meeting, "own_address", lambda *where: "127.0.0.1")
    monkeypatch.setenv(GLOO, "eth7")
    environ = {"MASTER_PORT": "7", **of_the_user}
    meeting.init_process_group(RANKS[1], torch.device("cpu"), timeout=PATIENCE, environ=environ)
    store = ("127.0.0.1", 7, RANKS[1], PATIENCE)
    expected = {"backend": "gloo", "rank": 1, "world_size": 2, "device_id": None}
    assert seen == {**expected, "store": store, "timeout": PATIENCE}
    assert os.environ[GLOO] == chosen
    assert meeting.interface_of("192.0.2.77") is meeting.interface_of("2001:db8::77") is None


def test_torchrun_may_not_restart_ranks_by_itself():
    environ = {"TORCHELASTIC_MAX_RESTARTS": "1"}
    for rank in (RankInfo(1, 2, 1, 2, 0, "torchrun"), RankInfo(0, 1, 0, 1, 0, "torchrun")):
        with pytest.raises(ConfigError, match=r"RESTARTS: the value is '1'.*--resume auto"):
            meeting.init_process_group(rank, torch.device("cpu"), environ=environ)


def test_devices_and_backends(monkeypatch):
    info = RankInfo(3, 4, 1, 2, 1, "torchrun")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", info) == torch.device("cpu")
    assert launch.backend_for(info, torch.device("cpu")) == "gloo"
    with pytest.raises(ConfigError, match=r"run\.device"):
        choose_device("cuda", info)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", info) == torch.device("cuda", 1)
    assert choose_device("cpu", info) == torch.device("cpu")
    assert launch.backend_for(info, torch.device("cuda", 1)) == "nccl"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks on this node can use only 1 GPUs"):
        choose_device("cuda", info)
    assert choose_device("cuda", info, "allow") == torch.device("cuda", 0)
    assert launch.backend_for(info, torch.device("cuda", 0)) == "gloo"  # NCCL shares no GPU


@pytest.mark.parametrize(
    ("launcher", "environ", "cores", "threads"),
    [
        ("torchrun", {"OMP_NUM_THREADS": "1"}, 13, 6),
        ("local", {"OMP_NUM_THREADS": "1"}, 13, 1),
        ("mpi", {"OMP_NUM_THREADS": "3,2"}, 13, 3),
        ("mpi", {}, 13, 6),
        ("mpi", {}, 1, 1),
        ("torchrun", {"OMP_NUM_THREADS": "1"}, 4, 4),
        ("mpi", {}, 12, 6),
        ("slurm", {"SLURM_CPUS_PER_TASK": "4"}, 13, 4),
        ("single", {"SLURM_CPUS_PER_TASK": "4"}, 13, 4),
    ],
)
def test_threads_are_a_share_of_the_cores(launcher, environ, cores, threads, monkeypatch):
    of_launcher = 13  # so ranks with fewer cores were bound to them
    cores_of = {0: cores, os.getppid(): of_launcher}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores_of[pid])))
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    info = RankInfo(0, 2, 0, 2, 0, launcher)
    assert [set_cpu_threads(info, environ)] == chosen == [threads]


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        ({**TORCHRUN, "MASTER_ADDR": "host"}, "host"),
        ({**HYDRA, **ON_ONE_NODE}, "127.0.0.1"),
        ({**HYDRA, "MASTER_ADDR": "fe80::1"}, "fe80::1"),
        *(
            ({**STEP, "SLURM_STEP_NODELIST": nodes}, host)
            for nodes, host in (
                ("gpu007", "gpu007"),
                ("gpu[007-010,12],login", "gpu007"),
                ("rack[2,4]node[08-09]", "rack2node08"),
                ("a-b.example.org,c[1-2]", "a-b.example.org"),
                ("n[1-2]-ib,x", "n1-ib"),
            )
        ),
    ],
)
def test_ranks_agree_where_to_meet(environ, host):
    assert meeting_point({**environ, **PORT}) == (host, 4000)


@pytest.mark.parametrize(
    ("environ", "other"),
    [
        (STEP, {"SLURM_STEP_ID": "1"}),
        (STEP, {"SLURM_JOB_ID": "12346"}),
        (STEP, {"SLURM_RESTART_COUNT": "1"}),
        (OF_A_JOB, {"PMIX_NAMESPACE": "prte@2"}),
        ({**OPEN_MPI, "MASTER_ADDR": "h", "OMPI_MCA_ess_base_jobid": "7"}, {"PMIX_NAMESPACE": "8"}),
    ],
)
def test_every_start_has_a_port_of_its_own(environ, other):
    _, port = meeting_point(environ)
    assert 20_000 <= port < 32_000
    assert meeting_point({**environ, "HOSTNAME": "another", "PPID": "2"})[1] == port
    assert meeting_point({**environ, **other})[1] != port


def test_ranks_of_our_own_launcher_meet_in_a_file(tmp_path):
    before = listeners([os.getpid()])
    rank = RankInfo(0, 2, 0, 2, 0, "local")
    store = meeting.open_store(rank, PATIENCE, {launch.MEETING: str(tmp_path / "store")})
    store.set("key", "value")
    assert b"value" in (tmp_path / "store").read_bytes()
    assert listeners([os.getpid()]) == before


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.3", "localhost"])
def test_the_store_listens_on_its_address_alone(address):
    number = int(free_port())
    before = set(listeners([os.getpid()]))
    with ThreadPoolExecutor() as pool:  # rank 1 comes first and waits
        client = pool.submit(store_of_rank_zero, address, number, RANKS[1], PATIENCE)
        store = store_of_rank_zero(address, number, RANKS[0], PATIENCE)
        client.result().set("key", "value")
    assert store.get("key") == b"value"
    shown = f"{socket.gethostbyname(address)}:{number}"
    assert set(listeners([os.getpid()])) - before <= {shown, f"::1:{number}"} != set()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1", "MASTER_PORT: .* is already in use on 127.0.0.1"),
        ("192.0.2.77", "MASTER_ADDR: 192.0.2.77 is not an address of this host"),
        ("0.0.0.0", "MASTER_ADDR: 0.0.0.0 is 0.0.0.0 on this host, an address that other"),
        ("localhost", r"MASTER_ADDR: localhost is \S+ on this host, an address that other"),
        ("no.such.host.invalid", "MASTER_ADDR: 'no.such.host.invalid' cannot be resolved"),
    ],
)
def test_where_rank_zero_does_not_listen_is_one_line(address, message):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=message):
            store_of_rank_zero(address, number, RankInfo(0, 2, 0, 1, 0, "mpi"), PATIENCE)
    with pytest.raises(LostRanksError, match=f"rank 1: cannot reach rank 0 .* port {number}"):
        store_of_rank_zero("127.0.0.1", number, RANKS[1], timedelta(seconds=0.1))


@pytest.mark.parametrize(
    ("nodes", "last"),
    [
        ("gpu007", "gpu007"),
        ("gpu[007-010,12],login", "login"),
        ("login,gpu[007-010,12]", "gpu12"),
        ("n[1-2]-ib,rack[2,4]node[08-09]", "rack4node09"),
    ],
)
def test_the_last_host_of_a_list(nodes, last):
    assert meeting.last_host(nodes) == last


MINE = {"eth0": b"\x0a\x00\x00\x01", "ib0": b"\x0a\x01\x00\x01", "lo": b"\x7f\x00\x00\x01"}
MINE["docker0"] = b"\xac\x11\x00\x01"
OURS = {**STEP, **PORT, "SLURMD_NODENAME": "gpu007", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("interfaces", "environ", "found"),
    [
        ("eth0 ib0", {GLOO: "ib0"}, "10.1.0.1"),
        ("eth0 ib0", {"NCCL_SOCKET_IFNAME": "ib,eth"}, "10.0.0.1"),
        ("eth0 ib0", {"NCCL_SOCKET_IFNAME": "=ib0"}, "10.1.0.1"),
        ("eth0 docker0", {"NCCL_SOCKET_IFNAME": "^docker"}, None),
        ("eth0", {}, None),
        ("eth0 ib0", {}, r"gpu007 is a loopback .* 10\.0\.0\.1 \(eth0\), 10\.1\.0\.1 \(ib0\)"),
        ("", {}, "whose other addresses are none"),
    ],
)
def test_a_host_whose_name_is_a_loopback_address(interfaces, environ, found, monkeypatch, capsys):
    """As with `127.0.1.1 name` in /etc/hosts; the names of other hosts stay names."""
    here = [(number, name) for number, name in enumerate(["lo", *interfaces.split()])]
    monkeypatch.setattr(socket, "if_nameindex", lambda: here)
    monkeypatch.setattr(meeting, "_ipv4_of", MINE.get)
    monkeypatch.setattr(meeting, "_own_address_to", lambda other: None)  # no such hosts here
    resolved = {"gpu007": "127.0.1.1", "gpu008": "10.0.0.2"}
    answer = socket.AF_INET, socket.SOCK_STREAM, 0, ""
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *_, **__: [(*answer, (resolved[name], 0))]
    )
    if found is not None and not found.startswith("10."):
        with pytest.raises(ConfigError, match=found):
            meeting_point({**OURS, **environ})
        return
    assert meeting_point({**OURS, **environ})[0] == (found or "10.0.0.1")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "because gpu007 is a loopback address here" in said
    assert ("10.1.0.1 (ib0)" in said) == (found == "10.0.0.1")  # the others are named
    second = {"SLURMD_NODENAME": "gpu008", "SLURM_PROCID": "8", "SLURM_NODEID": "1"}
    assert meeting_point({**OURS, **environ, **second})[0] == "gpu007"
    assert meeting_point({**OURS, **environ, "MASTER_ADDR": "gpu008"})[0] == "gpu008"
    assert capsys.readouterr().err == ""


def process(rank, size, on_node, launcher="mpi"):
    return RankInfo(rank, size, rank % on_node, on_node, rank // on_node, launcher)


def test_every_trainer_has_a_reader_on_its_node():
    roles = [role_of(process(rank, 8, 4)) for rank in range(8)]
    assert [role.is_reader for role in roles] == [False, False, True, True] * 2
    ranks = [RankInfo(rank, 4, rank % 2, 2, rank // 2, "mpi") for rank in range(4)]
    assert [role.info for role in roles] == [*ranks[:2] * 2, *ranks[2:] * 2]
    for rank, role in enumerate(roles):
        other = roles[role.partner]
        assert (other.partner, other.is_reader) == (rank, not role.is_reader)
        assert other.info == role.info


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (process(0, 3, 3), "even number of processes per node, not 3"),
        (process(0, 4, 4, "torchrun"), "the launcher is 'torchrun'"),
        (process(0, 1, 1, "single"), "mpiexec -n"),
        (process(0, 6, 4), "same number"),
        (RankInfo(1, 8, 0, 4, 1, "mpi"), "consecutive"),  # dealt out round robin
    ],
)
def test_processes_that_make_no_pairs_are_refused(info, said):
    with pytest.raises(ConfigError, match=said) as caught:
        role_of(info)
    assert str(caught.value).startswith("data.loader")
