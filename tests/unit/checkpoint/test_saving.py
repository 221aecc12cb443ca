"""When a run is saved, and that every way of training goes on from it without a trace."""

import json
import re
import shutil
from pathlib import Path

import pytest

from resume_cases import DROPOUT, run_train, weights
from support import metrics_losses, mlperf_records


@pytest.mark.parametrize(
    "settings",
    [
        ("data.sampler=quantile",),
        ("data.sampler=strata",),
        ("run.step_mode=captured",),
        ("eval.overlap=side_stream", "eval.interval_samples=48", "checkpoint.interval_steps=14"),
        ("optim.name=lamb", "model.precision=bf16"),
        ("model.precision=fp16", "optim.loss_scale_growth_steps=5"),
        ("parallel.grad_accum_steps=2", "clip.policy=bucket_before_allreduce"),
    ],
    ids=lambda settings: settings[0],
)
def test_every_way_of_training_goes_on_bit_for_bit(
    tiny_config: Path, synthetic_data: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    same = (*DROPOUT, "checkpoint.interval_steps=7", "checkpoint.keep_last=99", *settings)
    run_train(tiny_config, synthetic_data, tmp_path / "whole", *same)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    own = tmp_path / "killed/run_0"
    (own / "outcome.json").unlink()
    kept = []  # 7 and 14, or the ends of their intervals, where the disk was not too busy
    for checkpoint in (own / "checkpoints").glob("step_*"):
        if checkpoint.name > "step_00000014":
            shutil.rmtree(checkpoint)
        else:
            kept.append(int(checkpoint.name.removeprefix("step_")))
    run_train(tiny_config, synthetic_data, tmp_path / "killed", *same, resume="auto")
    assert len(metrics_losses(tmp_path / "whole")) == 20
    (record,) = mlperf_records(tmp_path / "killed/result_0.txt", "resumed")
    assert record["metadata"]["step"] == max(kept)
    assert metrics_losses(tmp_path / "killed") == metrics_losses(tmp_path / "whole")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def test_a_checkpoint_waits_for_no_evaluation_that_is_on_its_way(
    tiny_config: Path, synthetic_data: Path, tmp_path: Path
) -> None:
    """One every 3 steps, each asked for 100 samples later: there is always one on its way."""
    beside = ("eval.overlap=side_stream", "eval.interval_samples=48")
    run_train(tiny_config, synthetic_data, tmp_path / "run", *beside, "checkpoint.interval_steps=5")
    names = {path.name for path in (tmp_path / "run/run_0/checkpoints").glob("step_*")}
    assert names == {"step_00000015", "step_00000020"}


def test_the_best_stays(
    tiny_config: Path, synthetic_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of those that were written: what comes while the disk is still busy is not."""
    settings = ("checkpoint.interval_steps=4", "checkpoint.keep_last=1", "optim.learning_rate=1e-2")
    settings += ("run.max_steps=60", "schedule.decay_steps=60", "eval.interval_samples=80")
    run_train(tiny_config, synthetic_data, tmp_path / "run", *settings)
    written = set(map(int, re.findall(r"checkpoint step_(\d+): ", capsys.readouterr().out)))
    records = (tmp_path / "run/run_0/metrics.jsonl").read_text().splitlines()
    accuracy = {
        found["step"]: found["mlm_accuracy"]
        for found in map(json.loads, records)
        if found["mlm_accuracy"] is not None and found["step"] in written
    }
    best = max(accuracy, key=lambda step: accuracy[step])
    assert max(written) == 60
    kept = {path.name for path in (tmp_path / "run/run_0/checkpoints").glob("step_*")}
    assert kept == {f"step_{best:08d}", "step_00000060"}


def test_never_is_never(
    tiny_config: Path, synthetic_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("checkpoint.save=never", "checkpoint.interval_steps=5")
    run_train(tiny_config, synthetic_data, tmp_path / "run", *settings)
    assert list((tmp_path / "run/run_0/checkpoints").iterdir()) == []
    assert "nothing saved" in capsys.readouterr().out
