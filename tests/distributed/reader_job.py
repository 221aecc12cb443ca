"""What test_mpi_readers.py runs under mpiexec: `reader_job.py CONFIG DATA OUTPUT`.

Trainers write what they saw to OUTPUT/rank_<n>.json.
"""

import json
import sys
from pathlib import Path

import numpy as np
from exchange_job import digest, planned_batches

from mlperf_bert.common.errors import DataError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.balance import make_planner
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.mpi_readers import MpiSource, Pair
from mlperf_bert.data.shards import SampleReader, Samples
from mlperf_bert.distributed.launch import read_rank_info
from mlperf_bert.distributed.reader_roles import MpiProcess, mpi_process
from mlperf_bert.parts.loader import run_reader

SIZES = (
    *("parallel.ranks_per_node=2", "parallel.local_batch_size=4", "parallel.grad_accum_steps=2"),
    *("data.loader=mpi_readers", "data.exchange_window_steps=3"),
)
POLICIES = ("none", "exchange_local", "exchange_global", "presort_global")
SEED = 5
STEPS = range(1, 10)  # windows of 1, 1, 2 and 3 steps, and a part of another


def received(config: RunConfig, data: Path, process: MpiProcess, steps: range) -> list[str]:
    """Digests of a trainer's batches, then what it says where they end early."""
    planner = make_planner(config, LengthIndex.open(data / "train"), SEED)
    source = MpiSource(Pair(process.world, process.role.partner), process.role.info.rank)
    found = []
    try:
        source.set_up(SEED)
        for step in steps:
            found += map(digest, source.micro_batches(planner.plan(step)))
    except DataError as error:
        found.append(str(error))
    source.close()
    return found


def fail_after(reads: int) -> None:
    """Let no reader read more often than that."""
    read = SampleReader.read
    ids_read = []

    def limited(self: SampleReader, ids: np.ndarray) -> Samples:
        if len(ids_read) == reads:
            raise DataError("shard", "is broken", "mend it")
        ids_read.append(ids)
        return read(self, ids)

    SampleReader.read = limited  # type: ignore[method-assign]


def main(config_path: Path, data: Path, output: Path) -> int:
    """Do everything one after the other, as trainer or as reader."""
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


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
