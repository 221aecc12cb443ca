"""What test_noise_meter.py runs on N ranks at once: `noise_job.py CONFIG OUTPUT`.

Every rank writes OUTPUT/rank_<n>.pt: of each way to reduce gradients, what was measured and the
weights, with the measuring on and off.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from small_runs import Run, start

from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import in_session

STEPS, INTERVAL = 4, 2
# Names of cases, and their settings; every number of ranks trains on the same forwards.
CASES = {
    "ddp adamw": (),
    "ddp unclipped before": ("clip.policy=bucket_before_allreduce", "clip.max_norm=1000"),
    "ddp clipped before": ("clip.policy=whole_before_allreduce", "clip.max_norm=0.01"),
    "ddp clipped after": ("clip.max_norm=0.01",),
    "flat unclipped": ("parallel.data_parallel=flat", "clip.policy=none"),
    "shard_world lamb": ("parallel.data_parallel=shard_world", "optim.name=lamb"),
}


def trained(run: Run) -> dict[str, Any]:
    """What STEPS steps measured, [measurements, 5], and the weights that they left."""
    found = [run.step(step, run.micro_batches(step)).noise for step in range(1, STEPS + 1)]
    assert [each is not None for each in found] == [
        step % INTERVAL == 0 and bool(run.config.run.noise_interval_steps)
        for step in range(1, STEPS + 1)
    ]
    measured = [each for each in found if each is not None]
    return {
        "measured": torch.stack(measured) if measured else None,
        "weights": run.optimizer.exact_weights(),
    }


def main(config: Path, output: Path) -> int:
    """All cases one after the other, in one process group."""

    def work(info: RankInfo, device: torch.device) -> int:
        found = {}
        for name, settings in CASES.items():
            for interval in (INTERVAL, 0):
                case = (*settings, f"run.noise_interval_steps={interval}")
                run = start(config, info, case, torch.float64)
                found[f"{name} {'on' if interval else 'off'}"] = trained(run)
        torch.save(found, output / f"rank_{info.rank}.pt")
        return 0

    return in_session(work, "cpu", "refuse")


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
