"""Reader processes beside trainers under mpiexec: batches and errors.

What they train: test_encoder_recipe.py.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from forked_ranks import free_port, mpiexec_of
from mlperf_bert.config.files import load_config
from mlperf_bert.data.balance import make_planner
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.make_loader import run_reader
from mlperf_bert.data.mpi_readers import MpiSource, Pair
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.distributed.launch import read_rank_info
from mlperf_bert.distributed.reader_roles import mpi_process
from mlperf_bert.errors import DataError
from resume_cases import run_train
from support import run_process
from test_exchange import digest, planned_batches

SIZES = (
    *("parallel.ranks_per_node=2", "parallel.local_batch_size=4", "parallel.grad_accum_steps=2"),
    "data.loader=mpi_readers",
)
POLICIES = ("none", "exchange_local", "exchange_global", "presort_global")
SEED = 5
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


def fail_after(reads):
    """Let no reader read more often than that."""
    read = SampleReader.read
    ids_read = []

    def limited(self, ids):
        if len(ids_read) == reads:
            raise DataError("shard", "is broken", "mend it")
        ids_read.append(ids)
        return read(self, ids)

    SampleReader.read = limited


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
            fail_after(3)
            run_reader(alone, data, process)
            run_reader(alone, data / "nowhere", process)
        else:
            steps = STEPS if info.rank == 0 else range(1, 2)
            seen["left alone"] = received(together, data, process, steps)
            seen["broken"] = received(alone, data, process, STEPS)
            seen["no data"] = received(alone, data, process, STEPS)
            (output / f"rank_{info.rank}.json").write_text(json.dumps(seen))
    return 0


WITH_READERS = tuple(
    word
    for setting in (
        *("data.loader=mpi_readers", "data.balance=exchange_local", "run.max_steps=8"),
        *("parallel.ranks_per_node=2", "parallel.local_batch_size=8"),
    )
    for word in ("--set", setting)
)


@pytest.fixture(scope="module")
def mpiexec():
    """The command that starts two trainers and two readers."""
    pytest.importorskip("mpi4py")
    return mpiexec_of(4)


@pytest.fixture(scope="module")
def seen(
    mpiexec,
    tiny_config,
    synthetic_data,
    tmp_path_factory,
):
    """Observations of both trainers in one job."""
    output = tmp_path_factory.mktemp("readers")
    job = (__file__, tiny_config, synthetic_data, output)
    done = run_process(*mpiexec, *job, PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr
    return [json.loads((output / f"rank_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("policy", POLICIES)
def test_readers_deliver_what_the_direct_loader_reads(seen, policy):
    for of_trainer in seen:
        assert len(of_trainer[policy]) == 2 * len(STEPS)
        assert of_trainer[policy] == of_trainer[f"{policy} planned"]


def test_an_error_in_a_reader_is_its_trainers(seen):
    for rank, of_trainer in enumerate(seen):
        *batches, said = of_trainer["broken"]
        assert batches == of_trainer["none planned"][:2]  # the first step
        assert said == f"reader of rank {rank}: shard: is broken; mend it"
        (said,) = of_trainer["no data"]
        assert said.startswith(f"reader of rank {rank}: ") and "nowhere" in said


def test_a_trainer_that_stops_takes_the_others_out_of_the_exchange(
    seen,
):
    *batches, said = seen[0]["left alone"]
    assert batches == seen[0]["exchange_global planned"][: len(batches)]
    assert said == "reader of rank 0: ended because another rank's did; see that rank's message"
    assert len(seen[1]["left alone"]) == 2


def test_an_error_in_a_reader_ends_the_run(mpiexec, tiny_config, synthetic_data, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(synthetic_data, data)
    shard = data / "train" / "shards" / "train.hdf5"
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    done = run_process(
        *(*mpiexec, "-m", "mlperf_bert", "train", "--config", tiny_config, "--data", data),
        *("--run-dir", tmp_path / "run", *WITH_READERS),
        MASTER_PORT=free_port(),
    )
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    assert any("reader of rank" in line and "train.hdf5" in line for line in lines), lines
    assert all(line.startswith("mlperf_bert: error: ") for line in lines)


def test_without_mpiexec_it_is_one_clear_line(tiny_config, synthetic_data, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert run_train(tiny_config, synthetic_data, run_dir, extra=WITH_READERS) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "data.loader" in said and "mpiexec -n" in said
    assert not run_dir.exists()


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
