"""A run that loses a rank at any moment ends, goes on, and ends equal to an undisturbed one.

So it does however it trains.

Left out by ./run_tests.sh: `make test-real` has one kill in each phase, `make test-slow` forty.
"""

import itertools
import random
import shutil
import signal
import time

import pytest

from campaign import (
    AIMS,
    DROPOUT,
    HEADING,
    LOST,
    MISSED,
    SETTINGS,
    STARTS_WITHIN_S,
    STEPS,
    STOPPED,
    Campaign,
    Setup,
    undisturbed,
)
from jobs import freeze
from runs import Run

SEED = 20261122
KILLS = 40
LAUNCHER_PATIENCE_S = 30  # with a rank that ignores SIGTERM, as a stopped one must
SLACK_S = 30  # for processes to end, on a machine that has other work
MODES = {
    "state in shards, bf16": ("parallel.data_parallel=shard_world", "model.precision=bf16"),
    "flat, captured": ("parallel.data_parallel=flat", "run.step_mode=captured"),
    "exchange, accumulation, buckets clipped": (
        *("data.balance=exchange_local", "parallel.local_batch_size=4"),
        *("parallel.grad_accum_steps=2", "clip.policy=bucket_before_allreduce"),
    ),
}
OTHER_RANKS_TOLERANCE = 5e-6  # of losses; those of another batch differ in the second digit


@pytest.fixture(scope="module")
def two_ranks(tiny):
    return Setup(*tiny, ranks=2)


@pytest.fixture(scope="module")
def expected(two_ranks, tmp_path_factory):
    return undisturbed(two_ranks, tmp_path_factory.mktemp("undisturbed") / "run")


def await_step(job, run, step):
    job.wait_until(lambda: run.last_step() >= step, STARTS_WITHIN_S)


@pytest.mark.real
def test_a_rank_killed_in_each_phase(two_ranks, expected, tmp_path):
    """In one run: the last kill's attempt begins with what the others left."""
    aims = ("start-up", "step", "evaluation", "checkpoint")
    campaign = Campaign(random.Random(SEED), tmp_path)
    kills = campaign.run(two_ranks, expected, aims)
    assert [each.phase for each in kills] == list(aims)


@pytest.mark.real
def test_a_rank_that_stops_ends_the_job(tiny, tmp_path):
    seconds = 8  # enough for the other rank to start
    setup = Setup(*tiny, ranks=2, settings=(*SETTINGS, f"run.hang_timeout_s={seconds}"))
    run = Run(tmp_path / "run")
    with setup.start(run) as job:
        ranks = job.wait_for_ranks(2, STARTS_WITHIN_S)
        await_step(job, run, 20)
        freeze([ranks[1]])
        job.wait_until(lambda: len(job.ranks()) == 1, seconds + SLACK_S)
        assert job.ended(LAUNCHER_PATIENCE_S + SLACK_S) == LOST  # the stopped one has gone as well
        assert f"within {seconds} s (run.hang_timeout_s)" in job.printed()
    assert run.check_checkpoints() > 0


@pytest.mark.real
def test_a_run_that_is_asked_to_end_goes_on_later(tiny, tmp_path):
    """The model is larger: ranks agree once a second, and then there must be steps left."""
    larger = ("model.num_layers=8", "model.intermediate_size=512")
    two_ranks = Setup(*tiny, ranks=2, settings=(*SETTINGS, *DROPOUT, *larger))
    expected = undisturbed(two_ranks, tmp_path / "undisturbed")
    run = Run(tmp_path / "run")
    stopped_at = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        with two_ranks.start(run, "--resume", "auto") as job:
            await_step(job, run, stopped_at + 5)
            job.process.send_signal(number)
            assert job.ended(SLACK_S) == STOPPED, job.printed()
        assert run.resumed_from() == stopped_at
        assert stopped_at + 5 <= run.last_step() < STEPS
        stopped_at = run.last_step()
        assert run.newest_step() == stopped_at
        expected.check_so_far(run)
    with two_ranks.start(run, "--resume", "auto") as job:
        assert job.ended(STARTS_WITHIN_S) == MISSED, job.printed()
    assert run.resumed_from() == stopped_at
    expected.check_final(run)


@pytest.mark.real
def test_going_on_with_other_ranks_gives_the_same_losses(tiny, tmp_path):
    """Dropout is off: its masks depend on ranks where each draws its own."""
    whole = undisturbed(Setup(*tiny, ranks=2, settings=SETTINGS), tmp_path / "two")
    first = sorted(whole.run.checkpoints.glob("step_*"))[0]
    step = int(first.name.removeprefix("step_"))
    assert step < STEPS
    for ranks in (1, 4):
        run = Run(tmp_path / f"ranks-{ranks}")
        setup = Setup(*tiny, ranks=ranks, settings=SETTINGS)
        with setup.start(run, "--resume", first) as job:
            assert job.ended(STARTS_WITHIN_S) == MISSED, job.printed()
        assert run.resumed_from() == step
        found = {record["step"]: record["loss"] for record in run.records()}
        wanted = {record["step"]: record["loss"] for record in whole.run.records()}
        assert found == pytest.approx(
            {number: loss for number, loss in wanted.items() if number > step},
            abs=OTHER_RANKS_TOLERANCE,
            rel=0,
        )


@pytest.mark.real
@pytest.mark.parametrize("mode", MODES)
def test_every_way_of_training_goes_on_bit_for_bit(tiny, tmp_path, mode):
    settings = (*SETTINGS, *DROPOUT, "checkpoint.keep_last=99", *MODES[mode])
    setup = Setup(*tiny, ranks=2, settings=settings)
    whole = undisturbed(setup, tmp_path / "whole")
    run = Run(tmp_path / "killed")
    shutil.copytree(whole.run.root, run.root)
    (run.directory / "outcome.json").unlink()
    for checkpoint in run.checkpoints.glob("step_*"):
        if checkpoint.name > "step_00000035":
            shutil.rmtree(checkpoint)
    with setup.start(run, "--resume", "auto") as job:
        assert job.ended(STARTS_WITHIN_S) == MISSED, job.printed()
    assert 0 < run.resumed_from() <= 35
    whole.check_final(run)


@pytest.mark.longest
@pytest.mark.timeout(3600)
def test_campaign(tiny, tmp_path):
    """KILLS kills, some at a random moment and some in each phase, of runs of 2, 3 and 4 ranks."""
    setups = [Setup(*tiny, ranks=ranks) for ranks in (2, 3, 4)]
    whole = {each.ranks: undisturbed(each, tmp_path / f"whole-{each.ranks}") for each in setups}
    table = tmp_path / "campaign.txt"
    aims = itertools.cycle(AIMS)
    began = time.monotonic()
    campaign = Campaign(random.Random(SEED), tmp_path)
    with table.open("w") as file:
        print(f"seed {SEED}\n{HEADING}", file=file, flush=True)
        for setup in itertools.cycle(setups):
            left = KILLS - len(campaign.kills)
            if left == 0:
                break
            wanted = list(itertools.islice(aims, min(2, left)))
            for each in campaign.run(setup, whole[setup.ranks], wanted):
                print(each.in_words(), file=file, flush=True)
        minutes = (time.monotonic() - began) / 60
        print(f"{len(campaign.kills)} kills in {minutes:.1f} minutes", file=file)
    assert len(campaign.kills) == KILLS
    assert {each.phase for each in campaign.kills} >= {*AIMS} - {"any"}


@pytest.mark.longest
@pytest.mark.timeout(900)
def test_a_state_in_shards_killed_in_checkpoints(tiny, tmp_path):
    """Every rank writes a part: one may be there, and another not."""
    sharded = (*SETTINGS, *DROPOUT, "parallel.data_parallel=shard_world")
    setup = Setup(*tiny, ranks=3, settings=sharded)
    expected = undisturbed(setup, tmp_path / "whole")
    kills = Campaign(random.Random(SEED), tmp_path).run(setup, expected, ("checkpoint",) * 3)
    assert [each.phase for each in kills] == ["checkpoint"] * 3
