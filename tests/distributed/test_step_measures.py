"""The slowest rank is found, though all ranks have the same step time."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from forked_ranks import as_rank, what_ranks_saw
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.run.metrics import Slowest, SlowestRank
from small_runs import CPU, start

WATCHED_STEPS = 3
SHORT_S, LONG_S = 0.01, 0.15
MODES = ("ddp", "flat", "zero1")
RANKS = 2
ONE_RANK = RankInfo(0, 1, 0, 1, 0, "single")


def watched(run, sleep_s):
    """Steps whose micro-batches sleep on this rank."""
    slowest = SlowestRank(run.info, run.model.body.embeddings, CPU, replays=False)
    batch = SimpleNamespace(data_wait_ms=0.0)
    run.steps(1, 1)  # warm-up: none of it counts
    run.model.bert.encoder.register_forward_pre_hook(lambda *_: time.sleep(sleep_s))
    for step in range(2, WATCHED_STEPS + 2):
        slowest.step_begins(batch)
        run.step(step, run.micro_batches(step))
    run.optimizer.wait_for_weights()
    found, then = slowest.compare(), slowest.compare()
    return {"rank": found.rank, "over_median": found.over_median, "then": then.rank}


@pytest.fixture(scope="module")
def ranks(tiny_config, tmp_path_factory):
    """Findings of each of two ranks in every mode."""
    return what_ranks_saw(__file__, (tiny_config,), RANKS, tmp_path_factory.mktemp("slowest"))


@pytest.mark.parametrize("mode", MODES)
def test_the_rank_that_sleeps_is_named(ranks, mode):
    one, other = (each[mode] for each in ranks)
    assert one == other
    assert one["rank"] == 1 and one["over_median"] > 1.5


def test_steps_before_a_comparison_do_not_count_in_the_next(ranks):
    assert all(each[mode]["then"] is None for each in ranks for mode in MODES)


def test_one_rank_is_not_compared(tiny_config):
    run = start(tiny_config, ONE_RANK, ())
    slowest = SlowestRank(run.info, run.model.body.embeddings, CPU, replays=False)
    assert slowest.compare() == Slowest()


def all_modes(config, info):
    """Who is slow in each way to reduce gradients: rank 1 sleeps longer."""
    sleep_s = LONG_S if info.rank == 1 else SHORT_S
    return {
        mode: watched(start(config, info, (f"parallel.data_parallel={mode}",)), sleep_s)
        for mode in MODES
    }


if __name__ == "__main__":
    as_rank(lambda info: all_modes(Path(sys.argv[1]), info), Path(sys.argv[2]))
