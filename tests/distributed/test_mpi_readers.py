"""Reader processes beside trainers under mpiexec: batches, losses and errors."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from forked_ranks import free_port, mpiexec_of
from mlperf_bert.__main__ import main as command_line
from mlperf_bert.config.files import load_config
from mlperf_bert.data.balance import make_planner
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.make_loader import run_reader
from mlperf_bert.data.mpi_readers import MpiSource, Pair
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.distributed import reader_roles
from mlperf_bert.distributed.launch import read_rank_info
from mlperf_bert.distributed.reader_roles import mpi_process
from mlperf_bert.errors import DataError
from resume_cases import MISSED, run_train
from support import metrics_losses, run_process, sets_of
from test_exchange import digest, planned_batches

SIZES = (
    *("parallel.ranks_per_node=2", "parallel.local_batch_size=4", "parallel.grad_accum_steps=2"),
    "data.loader=mpi_readers",
)
POLICIES = ("none", "exchange_local", "exchange_global", "presort_global")
WITH_READERS = sets_of(
    *("data.loader=mpi_readers", "data.balance=exchange_local", "run.max_steps=8"),
    *("parallel.ranks_per_node=2", "parallel.local_batch_size=8"),
)
SEED = 5
LOSS_TOLERANCE = 5e-6
STEPS = range(1, 10)  # more than a reader sends ahead


def received(config, data, process, steps):
    """Digests of a trainer's batches, then what it says where they end early."""
    planner = make_planner(config, LengthIndex.open(data / "train"), SEED)
    pair = Pair(process.world, process.role.partner)
    source = MpiSource(pair, process.role.info.rank, data / "train")
    found = []
    try:
        source.set_up(SEED)
        for step in steps:
            found += map(digest, source.micro_batches(planner.plan(step)))
    except DataError as error:
        found.append(str(error))
    source.close()
    return found


def fail_after(patch, reads):
    """Let no reader read more often than that."""
    read = SampleReader.read
    ids_read = []

    def limited(self, ids):
        if len(ids_read) == reads:
            raise DataError("shard", "is broken", "mend it")
        ids_read.append(ids)
        return read(self, ids)

    patch.setattr(SampleReader, "read", limited)


def trained(process, config, data, output):
    """The status of the command in this job, which has begun MPI already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_roles, "mpi_process", lambda _: nullcontext(process))
        places = ("--config", config, "--data", data, "--run-dir", output / "run")
        return command_line(["train", *map(str, places), *WITH_READERS])


def main(config_path, data, output):
    """Do everything one after the other, as trainer or as reader; trainers write what they saw."""
    with mpi_process(read_rank_info()) as process:
        info, seen = process.role.info, {}
        for policy in POLICIES:
            config = load_config(config_path, (*SIZES, f"data.balance={policy}"))
            if process.role.is_reader:
                run_reader(config, data, process)
            else:
                seen[policy] = received(config, data, process, STEPS)
                seen[f"{policy} planned"] = planned_batches(config, data, info, STEPS)
        alone = load_config(config_path, SIZES)
        together = load_config(config_path, (*SIZES, "data.balance=exchange_global"))
        if process.role.is_reader:
            run_reader(together, data, process)
            with pytest.MonkeyPatch.context() as patch:
                fail_after(patch, 3)
                run_reader(alone, data, process)
            run_reader(alone, data / "nowhere", process)
        else:
            steps = STEPS if info.rank == 0 else range(1, 2)
            seen["left alone"] = received(together, data, process, steps)
            seen["broken"] = received(alone, data, process, STEPS)
            seen["no data"] = received(alone, data, process, STEPS)
        seen["status"] = trained(process, config_path, data, output)
        if not process.role.is_reader:
            (output / f"rank_{info.rank}.json").write_text(json.dumps(seen))
    return 0


@pytest.fixture(scope="module")
def job(tiny_config, synthetic_data, tmp_path_factory):
    """Observations of both trainers in one job, and the run that they trained."""
    pytest.importorskip("mpi4py")
    output = tmp_path_factory.mktemp("readers")
    words = (*mpiexec_of(4), __file__, tiny_config, synthetic_data, output)
    path = os.pathsep.join(sys.path)
    done = run_process(*words, PYTHONPATH=path, MASTER_PORT=free_port())
    assert done.returncode == 0, done.stderr
    of_ranks = [json.loads((output / f"rank_{rank}.json").read_text()) for rank in range(2)]
    return of_ranks, output / "run"


@pytest.fixture(scope="module")
def seen(job):
    return job[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_readers_deliver_what_the_direct_loader_reads(seen, policy):
    for of_trainer in seen:
        assert len(of_trainer[policy]) == 2 * len(STEPS)
        assert of_trainer[policy] == of_trainer[f"{policy} planned"]


def test_they_train_as_one_rank_that_reads_by_itself(job, tiny_config, synthetic_data, tmp_path):
    (one, other), run = job
    assert one["status"] == other["status"] == MISSED
    assert run_train(tiny_config, synthetic_data, tmp_path, "run.max_steps=8") == MISSED
    expected = metrics_losses(tmp_path)
    assert len(expected) == 8
    assert metrics_losses(run) == pytest.approx(expected, abs=LOSS_TOLERANCE, rel=0)


def test_an_error_in_a_reader_is_its_trainers(seen):
    for rank, of_trainer in enumerate(seen):
        *batches, said = of_trainer["broken"]
        assert batches == of_trainer["none planned"][:2]  # the first step
        assert said == f"reader of rank {rank}: shard: is broken; mend it"
        (said,) = of_trainer["no data"]
        assert said.startswith(f"reader of rank {rank}: ") and "nowhere" in said


def test_a_trainer_that_stops_takes_the_others_out_of_the_exchange(seen):
    *batches, said = seen[0]["left alone"]
    assert batches == seen[0]["exchange_global planned"][: len(batches)]
    problem = "stopped because another rank's reader stopped"
    assert said == f"reader of rank 0: {problem}; see the error message of the other rank"
    assert len(seen[1]["left alone"]) == 2


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
