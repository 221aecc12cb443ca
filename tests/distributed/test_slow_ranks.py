"""A rank whose own work is slow is named by all ranks, though all have the same step time."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from straggler_job import LONG_S, MODES

from forked_ranks import run_ranks

RANKS = 2


@pytest.fixture(scope="module")
def seen(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote."""
    output = tmp_path_factory.mktemp("stragglers")
    job = Path(__file__).with_name("straggler_job.py")
    statuses, printed = run_ranks(job, (tiny_config, output), RANKS)
    assert statuses == [0] * RANKS, printed
    return [json.loads((output / f"rank_{n}.json").read_text()) for n in range(RANKS)]


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
