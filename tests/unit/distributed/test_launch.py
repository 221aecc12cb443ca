"""Ranks from each launcher's variables, the meeting point, devices and threads."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.distributed import launch
from mlperf_bert.distributed.device import choose_device
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.threads import set_cpu_threads

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
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
STEP = {
    **BATCH_SHELL,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
ALONE = RankInfo(0, 1, 0, 1, 0, "single")


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
        ({"WORLD_SIZE": "4"}, ALONE),
    ],
)
def test_rank_is_read_from_each_launcher(environ: dict[str, str], expected: RankInfo) -> None:
    assert launch.read_rank_info(environ) == expected


def test_an_interactive_shell_in_a_step_is_one_rank() -> None:
    shell = {**BATCH_SHELL, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
    assert launch.read_rank_info(shell) == RankInfo(0, 1, 0, 1, 0, "slurm")


def test_slurm_without_step_sizes_uses_those_of_the_job() -> None:
    old = {name: value for name, value in STEP.items() if not name.startswith("SLURM_STEP_")}
    assert launch.read_rank_info({**old, "SLURM_STEP_ID": "0"}) == RankInfo(9, 16, 1, 8, 1, "slurm")


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({**TORCHRUN, "RANK": "three"}, "RANK"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "4"}, "torchrun"),
        ({**HYDRA, "PMI_SIZE": ""}, "PMI_SIZE"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI_LOCALNRANKS"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "-1"}, "OMPI_COMM_WORLD_LOCAL_RANK"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1e1"}, "SLURM_STEP_NUM_TASKS"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "8(2)"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "12"}, "SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_a_bad_variable_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{named}\b"):
        launch.read_rank_info(environ)


def test_one_rank_gets_no_process_group() -> None:
    launch.init_process_group(ALONE, torch.device("cpu"), environ={})
    assert not dist.is_initialized()
    launch.shutdown()


def test_a_group_is_joined_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda **options: seen.update(options))
    monkeypatch.setattr(launch, "store_of_rank_zero", lambda *where: where)
    monkeypatch.setattr(launch, "own_address", lambda *where: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "of the user")
    info = RankInfo(1, 2, 1, 2, 0, "mpi")
    wait = timedelta(seconds=9)
    environ = {"MASTER_PORT": "7"}
    launch.init_process_group(info, torch.device("cpu"), timeout=wait, environ=environ)
    assert seen == {
        "backend": "gloo",
        "store": ("127.0.0.1", 7, info, wait),
        "rank": 1,
        "world_size": 2,
        "timeout": wait,
        "device_id": None,
    }
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_the_interface_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "store_of_rank_zero", lambda *where: where)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    info = RankInfo(1, 2, 1, 2, 0, "mpi")
    launch.open_store(info, timedelta(0), {**os.environ, "MASTER_PORT": "7"})
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_nccl_wants_a_gpu_for_each_rank_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    info = RankInfo(3, 4, 1, 2, 1, "slurm")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert launch.backend_for(info, torch.device("cuda", 1)) == "nccl"
    assert launch.backend_for(info, torch.device("cpu")) == "gloo"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert launch.backend_for(info, torch.device("cuda", 0)) == "gloo"


def test_device_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    info = RankInfo(3, 4, 1, 2, 1, "torchrun")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", info) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"run\.device"):
        choose_device("cuda", info)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", info) == torch.device("cuda", 1)
    assert choose_device("cpu", info) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks on this node see 1 GPUs"):
        choose_device("cuda", info)
    assert choose_device("cuda", info, "allow") == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("launcher", "environ", "threads"),
    [
        ("torchrun", {"OMP_NUM_THREADS": "1"}, 6),
        ("local", {"OMP_NUM_THREADS": "1"}, 1),
        ("mpi", {"OMP_NUM_THREADS": "3,2"}, 3),
        ("mpi", {}, 6),
        ("slurm", {"SLURM_CPUS_PER_TASK": "4"}, 4),
    ],
)
def test_threads_are_a_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
    launcher: launch.Launcher,
    environ: dict[str, str],
    threads: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(13)))
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    info = RankInfo(0, 2, 0, 2, 0, launcher)
    assert set_cpu_threads(info, environ) == threads
    assert chosen == [threads]


def test_more_ranks_than_cores_still_get_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert set_cpu_threads(RankInfo(0, 2, 0, 2, 0, "mpi"), {}) == 1


def test_restarts_are_those_of_torchrun() -> None:
    assert launch.restart_count({}) == 0
    assert launch.restart_count({"TORCHELASTIC_RESTART_COUNT": "2"}) == 2
    with pytest.raises(ConfigError, match="TORCHELASTIC_RESTART_COUNT: is 'x'"):
        launch.restart_count({"TORCHELASTIC_RESTART_COUNT": "x"})
