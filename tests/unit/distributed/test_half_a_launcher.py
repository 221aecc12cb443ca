"""Half of a launcher's variables: enough for one rank alone, else named with what is missing."""

import time
from dataclasses import replace

import pytest

from mlperf_bert.distributed.launch import RankInfo, read_rank_info
from mlperf_bert.distributed.rendezvous import warn_if_waiting
from mlperf_bert.errors import ConfigError

ALONE = RankInfo(0, 1, 0, 1, 0, "single")
PALS = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}

ALONE_BY = {
    "Kubeflow": {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"},
    "the size alone": {"WORLD_SIZE": "1"},
    "Flux": {"PMI_RANK": "0", "PMI_SIZE": "1", "FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
    "Flux without PMI": {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", "FLUX_TASK_LOCAL_ID": "0"},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    "jsrun": {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "1"},
    "a container in a step": {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
    "a batch shell": {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"},
}
HALF = {  # variables, what was seen, what is missing, what to unset
    "Kubeflow": (
        {"RANK": "2", "WORLD_SIZE": "4"},
        "RANK='2' and WORLD_SIZE='4' are set",
        "LOCAL_RANK, LOCAL_WORLD_SIZE are not",
        "unset RANK WORLD_SIZE",
    ),
    "the rank alone": ({"RANK": "0"}, "RANK='0' is set", "WORLD_SIZE, LOCAL_RANK,", "unset RANK"),
    "the size alone": (
        {"WORLD_SIZE": "4"},
        "WORLD_SIZE='4' is set",
        "RANK, LOCAL_RANK,",
        "unset WORLD_SIZE",
    ),
    "PALS": (
        {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1"},
        "PALS_RANKID='1' is set",
        "RANK, WORLD_SIZE",
        "unset PALS_RANKID",
    ),
    "Flux": (
        {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"},
        "FLUX_TASK_RANK='1' and FLUX_JOB_SIZE='2' are set",
        "RANK, WORLD_SIZE,",
        "unset FLUX",
    ),
    "MPICH": (
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        "PMI_RANK='1' and PMI_SIZE='2' are set",
        "MPI_LOCALRANKID, MPI_LOCALNRANKS are not",
        "unset PMI_RANK PMI_SIZE",
    ),
    "Open MPI": (
        {"OMPI_COMM_WORLD_RANK": "1"},
        "OMPI_COMM_WORLD_RANK='1' is set",
        "OMPI_COMM_WORLD_SIZE,",
        "unset OMPI_COMM_WORLD_RANK",
    ),
    "SLURM": (
        SLURM,
        "SLURM_STEP_ID='0' and SLURM_PROCID='0' are set",
        "SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_TASKS_PER_NODE are",
        "unset SLURM_STEP_ID SLURM_PROCID",
    ),
}


@pytest.mark.parametrize("launcher", ALONE_BY)
def test_one_rank_needs_no_more(launcher):
    assert read_rank_info(ALONE_BY[launcher]) == ALONE


@pytest.mark.parametrize("launcher", HALF)
def test_what_is_missing_is_named(launcher):
    environ, *said = HALF[launcher]
    with pytest.raises(ConfigError) as caught:
        read_rank_info(environ)
    assert [words for words in said if words not in str(caught.value)] == []


def test_a_whole_launcher_counts_before_half_of_another():
    """Scripts on clusters often set WORLD_SIZE and RANK beside srun or mpiexec."""
    step = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    for more in ({"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "0"}, {"WORLD_SIZE": ""}):
        assert read_rank_info({**step, **more}) == RankInfo(0, 2, 0, 2, 0, "slurm")
        assert read_rank_info({**PALS, **more}) == RankInfo(3, 4, 1, 2, 1, "mpi")
    assert read_rank_info({"RANK": "", "WORLD_SIZE": ""}) == ALONE


def test_the_local_rank_of_pals_is_enough():
    assert read_rank_info(PALS) == RankInfo(3, 4, 1, 2, 1, "mpi")


def test_a_rank_outside_its_world_is_not_alone():
    for environ in ({"RANK": "3", "WORLD_SIZE": "1"}, {**SLURM, "SLURM_PROCID": "1"}):
        with pytest.raises(ConfigError, match=" are set, "):
            read_rank_info(environ)


def test_variables_of_a_job_that_is_over_are_named_while_waiting(capsys):
    left_over = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    left_over |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    info = read_rank_info(left_over)
    with warn_if_waiting(info, left_over, after_s=0):
        while not (said := capsys.readouterr().err):
            time.sleep(0.01)
    assert "waiting for 1 other ranks, because SLURM_STEP_ID and SLURM_PROCID are set; if" in said
    with warn_if_waiting(replace(info, rank=1), left_over, after_s=0):
        pass
    with warn_if_waiting(info, left_over):  # the others came in time
        pass
    assert capsys.readouterr().err == ""
