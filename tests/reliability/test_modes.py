"""Two ranks go on bit for bit however they train; and under torchrun's own restarts."""

import shutil
import time
from pathlib import Path

import pytest
from campaign import DROPOUT, ENDS_WITHIN_S, MISSED, SETTINGS, STARTS_WITHIN_S, Setup, undisturbed
from jobs import MAIN, Job, kill
from runs import Run

pytestmark = pytest.mark.real
MODES = {
    "state in shards, bf16": ("parallel.data_parallel=shard_world", "model.precision=bf16"),
    "flat, captured": ("parallel.data_parallel=flat", "run.step_mode=captured"),
    "exchange, accumulation, buckets clipped": (
        *("data.balance=exchange_local", "parallel.local_batch_size=4"),
        *("parallel.grad_accum_steps=2", "clip.policy=bucket_before_allreduce"),
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_way_of_training_goes_on_bit_for_bit(
    tiny: tuple[Path, Path], tmp_path: Path, mode: str
) -> None:
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


def test_torchrun_restarts_go_on(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    setup = Setup(*tiny, ranks=2)
    whole = undisturbed(setup, tmp_path / "whole")
    run, status = Run(tmp_path / "run"), tmp_path / "status"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    arguments = setup.arguments(run, "--status-file", status)
    restarts = ("--max-restarts=1", "--monitor-interval=0.2")
    with Job(arguments, tmp_path / "output", main=(*torchrun, *restarts, *MAIN)) as job:
        job.wait_until(lambda: run.last_step() >= 20, STARTS_WITHIN_S)
        kill(job.ranks()[1])
        deadline = time.monotonic() + STARTS_WITHIN_S + ENDS_WITHIN_S
        while job.is_running and time.monotonic() < deadline:
            time.sleep(0.1)
        assert job.ended(1) == 0, job.printed()
    assert status.read_text() == f"{MISSED}\n"
    assert run.resumed_from() >= 7
    whole.check_final(run)
