"""Waits of trainers for reader processes, at full speed and with reading slowed to half a step.

    .venv/bin/python logs/2026-11-21-presort/bench_readers.py [--steps N] [--json FILE]

Starts itself under mpiexec as two trainers and two readers, which train a small model on made-up
text. Waiting is the mean over steps and trainers without the first batch, which is always read with
the clock running; `reader cpu` is the share of a core that a reader uses meanwhile.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.sampler import Int64Array
from mlperf_bert.data.shards import SampleReader, Samples
from mlperf_bert.distributed.launch import RankInfo, read_rank_info
from mlperf_bert.distributed.reader_roles import MpiProcess, mpi_process
from mlperf_bert.distributed.session import in_session
from mlperf_bert.parts import loader as data_of_config
from mlperf_bert.parts.build import Run, build
from mlperf_bert.parts.loader import run_reader
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.step.warm_up import warm_up

# The made-up text belongs to the tests, which are no package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support import TINY_CONFIG, make_synthetic_data

POLICIES = ("none", "exchange_local", "exchange_global", "presort_global")
SETTINGS = (
    *("data.loader=mpi_readers", "parallel.ranks_per_node=2", "parallel.local_batch_size=16"),
    *("model.hidden_size=128", "model.intermediate_size=512", "schedule.decay_steps=1000000"),
)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Results of one run of the loop; means over the trainers or the readers."""

    policy: str
    delay_ms: float  # added to the reading of every step
    step_ms: float
    wait_ms: float  # a step
    first_wait_ms: float
    reader_cpu: float

    def in_words(self) -> str:
        """One line of the table."""
        return (
            f"{self.policy:15} reading +{self.delay_ms:5.1f} ms  step {self.step_ms:6.1f} ms  "
            f"waiting {self.wait_ms:6.3f} ms = {self.wait_ms / self.step_ms:6.2%}  "
            f"first batch {self.first_wait_ms:6.1f} ms  reader cpu {self.reader_cpu:5.1%}"
        )


class SlowReader(SampleReader):
    """A reader that takes `delay_s` longer for every read, one per step without accumulation."""

    delay_s = 0.0

    def read(self, ids: Int64Array) -> Samples:
        """Read, late."""
        time.sleep(self.delay_s)
        return super().read(ids)


def main() -> None:
    """Make the data and start the job, or be one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        be_a_process(args.folder, args.steps, args.json)
        return
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = beside if beside.exists() else shutil.which("mpiexec")
    with tempfile.TemporaryDirectory() as folder:
        make_synthetic_data(Path(folder))
        (Path(folder) / "tiny.toml").write_text(TINY_CONFIG, encoding="utf-8")
        command = [mpiexec, "-n", "4", sys.executable, __file__, *sys.argv[1:]]
        subprocess.run([*map(str, command), "--folder", folder], check=True)


def be_a_process(folder: Path, steps: int, json_path: Path | None) -> None:
    """Train or read for every policy, first at full speed, then slowed."""
    torch.set_num_threads(1)
    data_of_config.SampleReader = SlowReader  # type: ignore[attr-defined]
    rows: list[Waiting] = []
    with mpi_process(read_rank_info()) as process:
        info = process.role.info

        def train(info: RankInfo, device: torch.device) -> int:
            for policy in POLICIES:
                for slowed in (False, True):
                    delay_ms = rows[-1].step_ms / 2 if slowed else 0.0
                    process.world.bcast(delay_ms, root=0)
                    config = load_config(
                        folder / "tiny.toml", (*SETTINGS, f"data.balance={policy}")
                    )
                    root = folder / f"{policy}_{slowed}"
                    measured = wait(config, folder, root, process, device, steps)
                    rows.append(summary(policy, delay_ms, process.world.allgather(measured)))
            return 0

        if process.role.is_reader:
            for policy in POLICIES:
                for _ in (False, True):
                    SlowReader.delay_s = 1e-3 * process.world.bcast(None, root=0)
                    config = load_config(
                        folder / "tiny.toml", (*SETTINGS, f"data.balance={policy}")
                    )
                    started = time.perf_counter(), time.process_time()
                    run_reader(config, folder, process)
                    elapsed = time.perf_counter() - started[0]
                    process.world.allgather([(time.process_time() - started[1]) / elapsed])
            return
        in_session(train, "cpu", "refuse", info)
    if info.rank == 0:
        print(*(row.in_words() for row in rows), sep="\n", flush=True)
        if json_path is not None:
            json_path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def wait(
    config: RunConfig,
    data: Path,
    root: Path,
    process: MpiProcess,
    device: torch.device,
    steps: int,
) -> list[float]:
    """Step time, waiting per step and waiting for the first batch of one trainer, all in ms."""
    run = Run(
        config=config,
        seed=int(config.run.seed),
        info=process.role.info,
        device=device,
        data_dir=data,
        directory=RunDirectory(root, 0),
        process=process,
    )
    parts = build(run)
    waits = []
    with parts.reporter, closing(parts.metrics_file), closing(parts.log), parts.loader as batches:
        warm_up(config, parts.step, parts.model, parts.optimizer, device)
        for batch in batches:
            parts.step(batch.plan.step, batch.micro_batches)
            waits.append(batch.wait_ms)
            if len(waits) == 1:
                started = time.perf_counter()
            if len(waits) > steps:
                break
        step_ms = 1e3 * (time.perf_counter() - started) / steps
    return [step_ms, float(np.mean(waits[1:])), waits[0]]


def summary(policy: str, delay_ms: float, measured: Sequence[Sequence[float]]) -> Waiting:
    """Means over the processes: three numbers per trainer, one per reader."""
    trainers = np.mean([row for row in measured if len(row) > 1], axis=0).tolist()
    readers = float(np.mean([row for row in measured if len(row) == 1]))
    return Waiting(policy, delay_ms, *trainers, readers)


if __name__ == "__main__":
    main()
