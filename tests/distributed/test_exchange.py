"""Exchange policies on four real ranks, two "nodes" of two: batches, losses and errors."""

import json
from pathlib import Path

import numpy as np
import pytest
from exchange_job import POLICIES, STEPS

from forked_ranks import run_ranks
from support import metrics_losses

RANKS = 4
LOSS_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def job(tiny_config: Path, synthetic_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the job wrote into; its four ranks are started once for all tests."""
    output = tmp_path_factory.mktemp("exchange")
    script = Path(__file__).with_name("exchange_job.py")
    statuses, printed = run_ranks(script, (tiny_config, synthetic_data, output), RANKS, RANKS // 2)
    assert statuses == [0] * RANKS, printed
    return output


@pytest.fixture(scope="module")
def seen(job: Path) -> list[dict[str, list[str]]]:
    return [json.loads((job / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("deal", ["snake", "one_direction"])
@pytest.mark.parametrize(
    ("policy", "definition"),
    [("exchange_local", "presort_local"), ("exchange_global", "exchange_global")],
)
def test_exchanged_batches_are_those_of_the_definition(
    seen: list[dict[str, list[str]]], policy: str, definition: str, deal: str
) -> None:
    for of_rank in seen:
        received = of_rank[f"{policy} {deal} received"]
        assert len(received) == 2 * len(STEPS)
        assert received == of_rank[f"{definition} {deal}"]
        assert received != of_rank[f"none {deal}"]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_same_losses(job: Path, policy: str) -> None:
    expected = metrics_losses(job / "none")
    assert len(expected) == 20
    assert metrics_losses(job / policy) == pytest.approx(expected, abs=LOSS_TOLERANCE, rel=0)


def test_means_of_ranks_depend_on_the_policy(job: Path) -> None:
    runs = [metrics_losses(job / f"per_rank {policy}") for policy in ("none", "exchange_global")]
    assert np.abs(np.subtract(*runs)).max() > 100 * LOSS_TOLERANCE


def test_a_rank_that_cannot_read_is_named_by_the_others(
    seen: list[dict[str, list[str]]],
) -> None:
    said = [of_rank["broken"] for of_rank in seen]
    assert said[3] == "shard: is broken; mend it"
    assert len(set(said[:3])) == 1
    assert "rank 3 could not read" in said[0]


def test_nodes_that_are_not_consecutive_ranks_are_refused_by_all(
    seen: list[dict[str, list[str]]],
) -> None:
    said = {of_rank["nodes"] for of_rank in seen}
    assert len(said) == 1
    assert said.pop().startswith("data.balance: 'exchange_local' wants nodes of 2 consecutive")
