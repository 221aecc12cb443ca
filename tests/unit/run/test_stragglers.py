"""Detection of slow ranks among many, from the measurements of each."""

from pathlib import Path

import pytest
import torch

from mlperf_bert.config.files import load_config
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.parts.build import make_model
from mlperf_bert.run.stragglers import (
    MOST_NAMED,
    OwnWork,
    StragglerWatch,
    in_words,
    over_median,
    own_work,
)

HOSTS = [f"n{rank // 8}" for rank in range(1024)]


def works(*seconds: float, tokens: float = 100) -> list[OwnWork]:
    return [OwnWork(each, each / tokens) for each in seconds]


def test_own_work_is_the_median_of_wait_and_work_by_step_and_by_token() -> None:
    found = own_work([0.2, 9.0, 0.4, 0.0], [(0.1, 100), (0.0, 100), (0.0, 50), (5.0, 1)])
    assert found.seconds == pytest.approx(0.4)
    assert found.seconds_per_token == pytest.approx(0.008)
    assert own_work([], []) == OwnWork(0.0, 0.0)


def test_a_slow_rank_is_named_with_its_host() -> None:
    measured = works(0.4, 0.4, 0.41, 0.812, 0.39)
    lines = in_words(measured, over_median(measured), HOSTS, 1.5)
    assert lines == [
        "rank 3 on n0 is slow: 0.812 s for its own work of a step, 2.03 times the median of "
        "0.400 s (run.straggler_factor 1.5)"
    ]


def test_longer_and_shorter_sequences_make_no_rank_slow() -> None:
    assert over_median(works(0.4, 0.8)) == pytest.approx([1.0, 2.0])  # of two, the slow one
    longer, shorter = OwnWork(0.8, 0.8 / 200), OwnWork(0.4, 0.4 / 50)
    assert max(over_median([*works(0.4, 0.4, 0.4), longer, shorter])) == pytest.approx(1.0)


def test_of_1024_ranks_the_slowest_are_named_and_the_others_counted() -> None:
    measured = works(*(1.0 + (rank >= 1000) * rank / 1000 for rank in range(1024)))
    lines = in_words(measured, over_median(measured), HOSTS, 1.5)
    assert len(lines) == MOST_NAMED + 1
    assert lines[0].startswith("rank 1023 on n127 is slow")
    assert lines[-1] == "16 more ranks are slow"


def test_ranks_that_measured_nothing_are_not_compared() -> None:
    measured = [*works(0.4), OwnWork(0.0, 0.0)]
    assert over_median(measured) == [1.0, 0.0]
    nobody = [OwnWork(0.0, 0.0)] * 2
    assert over_median(nobody) == [0.0, 0.0] and in_words(nobody, [0.0, 0.0], HOSTS, 1.5) == []


def test_one_rank_is_never_slow(tiny_config: Path) -> None:
    config, device = load_config(tiny_config), torch.device("cpu")
    alone = RankInfo(0, 1, 0, 1, 0, "single")
    watch = StragglerWatch(config.run, alone, make_model(config, 1, device), device)
    assert watch.compare((0.0, 1)) == [] and watch.slowest_over_median is None
