"""A run that loses a rank at any moment ends, goes on, and ends equal to an undisturbed one.

So it does however it trains.

Left out by ./run_tests.sh: `make test-real` has one kill in each phase, `make test-slow` forty and
the rest.
"""

import itertools
import random
import shutil
import signal

import pytest

from campaign import (
    AIMS,
    DROPOUT,
    LOST,
    SETTINGS,
    STARTS_WITHIN_S,
    STEPS,
    STOPPED,
    Setup,
    lose_ranks,
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


def await_step(job, run, step):
    job.wait_until(lambda: run.last_step() >= step, STARTS_WITHIN_S)


@pytest.mark.real
def test_a_rank_killed_in_each_phase(tiny, tmp_path):
    """In one run: the last kill's attempt begins with what the others left."""
    aims = ("start-up", "step", "evaluation", "checkpoint")
    setup = Setup(*tiny, ranks=2)
    whole = setup.train(Run(tmp_path / "whole"))
    kills = lose_ranks(setup, whole, Run(tmp_path / "run"), aims, random.Random(SEED))
    assert [each.phase for each in kills] == list(aims)


@pytest.mark.longest
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


@pytest.mark.longest
def test_a_run_that_is_asked_to_end_goes_on_later(tiny, tmp_path):
    """The model is larger: ranks agree once a second, and then there must be steps left."""
    larger = ("model.num_layers=8", "model.intermediate_size=512")
    two_ranks = Setup(*tiny, ranks=2, settings=(*SETTINGS, *DROPOUT, *larger))
    whole = two_ranks.train(Run(tmp_path / "whole"))
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
        run.check_so_far(whole)
    assert two_ranks.train(run, "--resume", "auto").resumed_from() == stopped_at
    run.check_final(whole)


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
@pytest.mark.parametrize("mode", MODES)
def test_every_way_of_training_goes_on_bit_for_bit(tiny, tmp_path, mode):
    settings = (*SETTINGS, *DROPOUT, "checkpoint.keep_last=99", *MODES[mode])
    setup = Setup(*tiny, ranks=2, settings=settings)
    whole = setup.train(Run(tmp_path / "whole"))
    run = Run(tmp_path / "killed")
    shutil.copytree(whole.root, run.root)
    (run.directory / "outcome.json").unlink()
    for checkpoint in run.checkpoints.glob("step_*"):
        if checkpoint.name > "step_00000035":
            shutil.rmtree(checkpoint)
    assert 0 < setup.train(run, "--resume", "auto").resumed_from() <= 35
    run.check_final(whole)


@pytest.mark.longest
@pytest.mark.timeout(3600)
def test_campaign(tiny, tmp_path):
    """KILLS kills, some at a random moment and some in each phase, of runs of 2, 3 and 4 ranks."""
    setups = [Setup(*tiny, ranks=ranks) for ranks in (2, 3, 4)]
    whole = [each.train(Run(tmp_path / f"whole-{each.ranks}")) for each in setups]
    aims, turns = itertools.cycle(AIMS), itertools.cycle(zip(setups, whole, strict=True))
    draw, kills, runs = random.Random(SEED), [], itertools.count()
    while len(kills) < KILLS:
        wanted = list(itertools.islice(aims, min(2, KILLS - len(kills))))
        kills += lose_ranks(*next(turns), Run(tmp_path / f"run-{next(runs)}"), wanted, draw)
    assert {each.phase for each in kills} >= {*AIMS} - {"any"}


@pytest.mark.longest
@pytest.mark.timeout(900)
def test_a_state_in_shards_killed_in_checkpoints(tiny, tmp_path):
    """Every rank writes a part: one may be there, and another not."""
    sharded = (*SETTINGS, *DROPOUT, "parallel.data_parallel=shard_world")
    setup = Setup(*tiny, ranks=3, settings=sharded)
    whole, draw = setup.train(Run(tmp_path / "whole")), random.Random(SEED)
    kills = lose_ranks(setup, whole, Run(tmp_path / "run"), ("checkpoint",) * 3, draw)
    assert [each.phase for each in kills] == ["checkpoint"] * 3
