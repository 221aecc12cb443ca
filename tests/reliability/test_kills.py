"""A run that loses a rank at any moment ends, goes on, and ends equal to an undisturbed one.

So it does however it trains.

Left out by ./run_tests.sh: `make test-real` has one kill in each phase, `make test-slow` three more
in each of three ways to train, and the rest.
"""

import random

import pytest

from campaign import (
    DROPOUT,
    LOST,
    PHASES,
    SETTINGS,
    STARTS_WITHIN_S,
    STEPS,
    Setup,
    lose_ranks,
)
from jobs import freeze
from runs import Run

SEED = 20261122
RUNS = 3
LAUNCHER_PATIENCE_S = 30  # with a rank that ignores SIGTERM, as a stopped one must
SLACK_S = 30  # for processes to end, on a machine that has other work
MODES = {  # by the number of ranks
    2: (
        *("data.balance=exchange_local", "parallel.local_batch_size=4"),
        *("parallel.grad_accum_steps=2", "clip.policy=bucket_before_allreduce"),
    ),
    # Every rank writes a part of a checkpoint: one may be there, and another not.
    3: ("parallel.data_parallel=zero1", "model.precision=bf16"),
    4: ("parallel.data_parallel=flat", "run.step_mode=captured"),
}
OTHER_RANKS_TOLERANCE = 5e-6  # of losses; those of another batch differ in the second digit


@pytest.mark.real
def test_a_rank_killed_in_each_phase(tiny, tmp_path):
    """In one run: the last kill's attempt begins with what the others left."""
    setup = Setup(*tiny, ranks=3, settings=(*SETTINGS, *DROPOUT, *MODES[3]))
    whole = setup.train(Run(tmp_path / "whole"))
    lose_ranks(setup, whole, Run(tmp_path / "run"), PHASES, random.Random(SEED))


@pytest.mark.longest
def test_a_rank_that_stops_ends_the_job(tiny, tmp_path):
    seconds = 8  # enough for the other rank to start
    setup = Setup(*tiny, ranks=2, settings=(*SETTINGS, f"run.hang_timeout_s={seconds}"))
    run = Run(tmp_path / "run")
    with setup.start(run) as job:
        ranks = job.wait_for_ranks(2, STARTS_WITHIN_S)
        job.wait_until(lambda: run.last_step() >= 20, STARTS_WITHIN_S)
        freeze([ranks[1]])
        job.wait_until(lambda: len(job.ranks()) == 1, seconds + SLACK_S)
        assert job.ended(LAUNCHER_PATIENCE_S + SLACK_S) == LOST  # the stopped one has gone as well
        assert f"within {seconds} s (run.hang_timeout_s)" in job.printed()
    assert run.check_checkpoints() > 0


@pytest.mark.longest
def test_going_on_with_other_ranks_gives_the_same_losses(tiny, tmp_path):
    """Dropout is off: its masks depend on ranks where each draws its own."""
    whole = Setup(*tiny, ranks=2, settings=SETTINGS).train(Run(tmp_path / "two"))
    first = sorted(whole.checkpoints.glob("step_*"))[0]
    step = int(first.name.removeprefix("step_"))
    assert step < STEPS
    for ranks in (1, 4):
        setup = Setup(*tiny, ranks=ranks, settings=SETTINGS)
        run = setup.train(Run(tmp_path / f"ranks-{ranks}"), "--resume", first)
        assert run.resumed_from() == step
        found = {record["step"]: record["loss"] for record in run.records()}
        wanted = {record["step"]: record["loss"] for record in whole.records()}
        assert found == pytest.approx(
            {number: loss for number, loss in wanted.items() if number > step},
            abs=OTHER_RANKS_TOLERANCE,
            rel=0,
        )


@pytest.mark.longest
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", MODES)
def test_campaign(tiny, tmp_path, ranks):
    """Runs that each lose a rank in every phase, in any order."""
    setup = Setup(*tiny, ranks=ranks, settings=(*SETTINGS, *DROPOUT, *MODES[ranks]))
    whole, draw = setup.train(Run(tmp_path / "whole")), random.Random(SEED)
    for number in range(RUNS):
        phases = draw.sample(PHASES, k=len(PHASES))
        lose_ranks(setup, whole, Run(tmp_path / f"run-{number}"), phases, draw)
