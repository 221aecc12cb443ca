"""The cores of a rank, on simulated machines and on this one."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

import machine_trees
from mlperf_bert.common.machine import Machine, read_machine
from mlperf_bert.distributed import binding, session
from mlperf_bert.distributed.binding import Binding, Choice, bind, choose_cpus, near_nodes
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.run.directory import environment
from support import run_process

NEAR = machine_trees.DGX_GPU_NODES
EVERYWHERE = set(range(256))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return read_machine(machine_trees.dgx_a100(tmp_path_factory.mktemp("dgx")))


def choices(machine: Machine, near: tuple[int | None, ...], allowed: set[int]) -> list[Choice]:
    found = [choose_cpus(machine, near, rank, allowed) for rank in range(len(near))]
    assert all(isinstance(choice, Choice) for choice in found), found
    cpus = [cpu for choice in found if isinstance(choice, Choice) for cpu in choice.cpus]
    assert len(cpus) == len(set(cpus))
    assert set(cpus) <= allowed
    return [choice for choice in found if isinstance(choice, Choice)]


def test_each_gpu_gets_half_of_the_cores_near_it(dgx: Machine) -> None:
    found = choices(dgx, NEAR, EVERYWHERE)
    assert found[0] == Choice((*range(48, 56), *range(176, 184)), 8, (3,))
    assert found[1] == Choice((*range(56, 64), *range(184, 192)), 8, (3,))
    for choice, node in zip(found, NEAR, strict=True):
        assert choice.nodes == (node,)
        assert set(choice.cpus) <= set(dgx.numa_nodes[node].cpus)
        assert len(choice.cpus) == 2 * choice.num_cores == 16
        assert {cpu + 128 for cpu in choice.cpus if cpu < 128} == {
            cpu for cpu in choice.cpus if cpu >= 128
        }


def test_without_gpus_nodes_are_dealt_in_blocks(dgx: Machine) -> None:
    assert [choice.nodes for choice in choices(dgx, (None,) * 4, EVERYWHERE)] == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    ]
    sixteen = choices(dgx, (None,) * 16, EVERYWHERE)
    assert [choice.nodes for choice in sixteen[:3]] == [(0,), (0,), (1,)]
    assert sum(choice.num_cores for choice in sixteen) == 128
    (alone,) = choices(dgx, (None,), EVERYWHERE)
    assert set(alone.cpus) == EVERYWHERE


def test_ranks_that_do_not_divide_the_cores(tmp_path: Path) -> None:
    two_nodes = machine_trees.processors(2, 5, 2, threads=1)
    machine = read_machine(machine_trees.write_files(tmp_path, two_nodes))
    found = choices(machine, (0, 0, 1, 1), set(range(10)))
    assert [choice.cpus for choice in found] == [(0, 1), (2, 3, 4), (5, 6), (7, 8, 9)]


def test_a_gpu_of_an_unknown_node_shares_with_its_neighbours(dgx: Machine) -> None:
    found = choices(dgx, (0, None, 99, 7), EVERYWHERE)
    assert [choice.nodes for choice in found] == [(0,), (2, 3), (4, 5), (7,)]


def test_only_allowed_cpus_are_taken(dgx: Machine) -> None:
    first_threads = set(range(128))
    assert [choice.num_cores for choice in choices(dgx, NEAR, first_threads)] == [8] * 8
    without_four = EVERYWHERE - {48, 49, 50, 51}
    first, second = choices(dgx, NEAR, without_four)[:2]
    assert (first.num_cores, second.num_cores) == (8, 8)
    assert 176 in first.cpus  # the other thread of a core that is allowed in part


@pytest.mark.parametrize(
    ("near", "allowed", "why"),
    [
        (NEAR, {0, 1}, "started with CPUs 0-1 of 256"),
        (NEAR, set(range(32)), "started with CPUs 0-31 of 256"),
        (NEAR, set(range(48)), "NUMA node 3"),  # more than a share, none of it near
        ((None, None), set(range(64)), "started with"),
        ((3,) * 64, EVERYWHERE, "NUMA node 3"),  # more ranks than cores near
    ],
)
def test_what_is_left_alone(
    dgx: Machine, near: tuple[int | None, ...], allowed: set[int], why: str
) -> None:
    reason = choose_cpus(dgx, near, 0, allowed)
    assert isinstance(reason, str)
    assert why in reason


def test_one_numa_node(tmp_path: Path) -> None:
    machine = read_machine(machine_trees.laptop(tmp_path))
    assert choose_cpus(machine, (None, None), 0, set(range(8))) == "one NUMA node and no GPU"
    found = choices(machine, (0, 0), set(range(8)))  # two GPUs
    assert [choice.cpus for choice in found] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    nothing = read_machine(tmp_path / "missing")
    assert choose_cpus(nothing, (0,), 0, {0}) == "the NUMA nodes are unknown"


def test_gpus_are_found_by_their_place_on_the_bus(
    dgx: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    buses = [0x87, 0x07]  # as CUDA_VISIBLE_DEVICES may have them
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(buses))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(pci_domain_id=0, pci_bus_id=buses[index], pci_device_id=0),
    )
    cuda = torch.device("cuda", 0)
    assert near_nodes(dgx, 3, cuda) == [7, 3, 7]
    assert near_nodes(dgx, 2, CPU) == [None, None]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    assert near_nodes(dgx, 2, cuda) == [None, None]


def test_the_binding_is_said(dgx: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: EVERYWHERE)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus))
    monkeypatch.setattr(binding, "_prefer_memory", lambda nodes: "")
    monkeypatch.setattr(binding, "near_nodes", lambda *_: NEAR)
    rank = RankInfo(0, 8, 0, 8, 0, "slurm")
    words = "CPUs 48-55,176-183 of NUMA node 3, memory there, near mlx5_0, mlx5_1, mlx5_8"
    assert bind(rank, CPU, dgx) == Binding(words, 8)
    assert bound == [(*range(48, 56), *range(176, 184))]
    monkeypatch.setattr(binding, "_prefer_memory", lambda nodes: "Operation not permitted")
    assert "memory left to the system (Operation not permitted)" in bind(rank, CPU, dgx).words


def test_a_refusal_is_said(dgx: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cpus: tuple[int, ...]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: EVERYWHERE)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    found = bind(RankInfo(0, 2, 0, 2, 0, "mpi"), CPU, dgx)
    assert found == Binding("not bound: Operation not permitted")


def test_a_system_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    assert bind(RankInfo(0, 1, 0, 1, 0, "single"), CPU).num_cores is None


@pytest.mark.parametrize(
    ("asked", "words"), [("auto", "as bound"), ("none", "not bound: parallel.binding is 'none'")]
)
def test_a_session_binds_and_the_run_keeps_the_words(
    asked: Literal["auto", "none"], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []

    def run(info: RankInfo, device: torch.device) -> int:
        kept.append(environment(info, device)["binding"])
        return 0

    monkeypatch.setattr(session, "bind", lambda info, device: Binding("as bound"))
    alone = RankInfo(0, 1, 0, 1, 0, "single")
    assert session.in_session(run, "cpu", "refuse", alone, binding=asked) == 0
    assert kept == [words]


REALLY = """
import os, torch
from mlperf_bert.distributed import binding
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.common.machine import Machine, NumaNode
before = os.sched_getaffinity(0)
here = tuple(sorted(before))
cores = tuple((cpu,) for cpu in here)
rank = RankInfo(0, 2, 0, 2, 0, "mpi")
nodes = (NumaNode(0, here[:1]), NumaNode(1, here[1:] or here))
machine = Machine("", 1, 1, len(here), None, "", 0, nodes, cores, (), None, (), "", "")
found = binding.bind(rank, torch.device("cpu"), machine)
print(found.words)
assert os.sched_getaffinity(0) == {here[0]}, found
binding.bind(rank, torch.device("cpu"))
"""


def test_this_process_really_moves() -> None:
    done = run_process(sys.executable, "-c", REALLY)
    assert done.returncode == 0, done.stderr
    assert "NUMA node 0, memory" in done.stdout
