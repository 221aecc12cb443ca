"""What test_slow_ranks.py runs on two ranks at once: `straggler_job.py CONFIG OUTPUT`.

Every rank writes OUTPUT/rank_<n>.json: what a watch says after a few steps in which rank 1 sleeps.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from small_runs import CPU, Run, start

from mlperf_bert.data.loader import StepBatch
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import in_session
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.run.stragglers import StragglerWatch

STEPS = 3
SHORT_S, LONG_S = 0.01, 0.15
MODES = ("ddp", "flat", "shard_world")
EQUAL, UNEQUAL = (100, 100), (100, round(100 * LONG_S / SHORT_S))  # tokens of the ranks, as planned


def watched(run: Run, sleep_s: float, tokens: tuple[int, int]) -> dict[str, Any]:
    """Steps whose forwards sleep on this rank; the planned tokens need not be the real ones."""
    model = cast(BertForPretraining, run.model)
    watch = StragglerWatch(run.config.run, run.info, model, CPU)
    plan = SimpleNamespace(num_tokens=np.array(tokens)[:, None])
    batch = cast(StepBatch, SimpleNamespace(plan=plan, wait_ms=0.0))
    run.steps(1, 1)  # warm-up: none of it counts
    model.bert.encoder.register_forward_pre_hook(lambda *_: time.sleep(sleep_s))
    for step in range(2, STEPS + 2):
        watch.step_begins(batch)
        run.step(step, run.micro_batches(step))
    run.optimizer.settle()
    return {
        "lines": watch.compare((0.0, 1)),
        "slowest": watch.slowest_over_median,
        "then": watch.compare((0.0, 1)),
    }


def all_cases(config: Path, info: RankInfo) -> dict[str, Any]:
    """By case; in each, rank 1 is the one that sleeps longer."""
    sleep_s = LONG_S if info.rank == 1 else SHORT_S
    found = {}
    for mode in MODES:
        run = start(config, info, (f"parallel.data_parallel={mode}",))
        found[mode] = watched(run, sleep_s, EQUAL)
    found["more tokens"] = watched(start(config, info, ()), sleep_s, UNEQUAL)
    return found


def main(config: Path, output: Path) -> int:
    """Run as the launcher says."""

    def run(info: RankInfo, _: object) -> int:
        path = output / f"rank_{info.rank}.json"
        path.write_text(json.dumps(all_cases(config, info)), encoding="utf-8")
        return 0

    return in_session(run, "cpu", "refuse")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
