"""A rank whose own work is slow is named by all ranks, though all have the same step time."""

import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from small_runs import CPU, Run, start

from forked_ranks import as_rank, what_ranks_saw
from mlperf_bert.data.loader import StepBatch
from mlperf_bert.distributed.launch import RankInfo
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


RANKS = 2


@pytest.fixture(scope="module")
def seen(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote."""
    return what_ranks_saw(__file__, (tiny_config,), RANKS, tmp_path_factory.mktemp("stragglers"))


@pytest.mark.parametrize("mode", MODES)
def test_the_rank_that_sleeps_is_named(seen: list[dict[str, Any]], mode: str) -> None:
    one, other = (each[mode] for each in seen)
    assert one == other
    (line,) = one["lines"]
    assert line.startswith(f"rank 1 on {socket.gethostname()} is slow: ")
    assert line.endswith("(run.straggler_factor 1.5)")
    assert float(line.split("is slow: ")[1].split(" s")[0]) >= LONG_S
    assert one["slowest"] > 1.5


def test_a_rank_with_more_tokens_is_not_named(seen: list[dict[str, Any]]) -> None:
    for each in seen:
        assert each["more tokens"]["lines"] == []
        assert each["more tokens"]["slowest"] < 1.5


def test_steps_before_a_comparison_do_not_count_in_the_next(seen: list[dict[str, Any]]) -> None:
    assert all(each[mode]["then"] == [] for each in seen for mode in MODES)


if __name__ == "__main__":
    as_rank(lambda info: all_cases(Path(sys.argv[1]), info), Path(sys.argv[2]))
