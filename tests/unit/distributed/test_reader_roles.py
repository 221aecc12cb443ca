"""Roles of processes under mpiexec: first half trainers, second half readers, node by node."""

import sys

import pytest

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.distributed.launch import Launcher, RankInfo
from mlperf_bert.distributed.reader_roles import mpi_process, role_of


def process(rank: int, size: int, on_node: int, launcher: Launcher = "mpi") -> RankInfo:
    return RankInfo(rank, size, rank % on_node, on_node, rank // on_node, launcher)


def test_every_trainer_has_a_reader_on_its_node() -> None:
    roles = [role_of(process(rank, 8, 4)) for rank in range(8)]
    assert [role.is_reader for role in roles] == [False, False, True, True] * 2
    assert [role.info.rank for role in roles] == [0, 1, 0, 1, 2, 3, 2, 3]
    for rank, role in enumerate(roles):
        other = roles[role.partner]
        assert other.partner == rank
        assert other.is_reader != role.is_reader
        assert other.info == role.info
        assert (role.info.world_size, role.info.local_world_size) == (4, 2)
        assert role.info.node_rank == rank // 4
        assert role.info.local_rank == role.info.rank % 2


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (process(0, 3, 3), "3 processes on a node"),
        (process(0, 4, 4, "torchrun"), "under 'torchrun'"),
        (process(0, 1, 1, "single"), "mpiexec -n"),
        (process(0, 6, 4), "same number"),
        (RankInfo(1, 8, 0, 4, 1, "mpi"), "consecutive"),  # dealt out round robin
    ],
)
def test_processes_that_make_no_pairs_are_refused(info: RankInfo, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        role_of(info)
    assert str(caught.value).startswith("data.loader")


def test_without_mpi4py_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with (
        pytest.raises(ConfigError, match=r"mpi4py.*install the extra 'mpi'"),
        mpi_process(process(0, 2, 2)),
    ):
        pass
