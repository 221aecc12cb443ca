"""One search whose trial is a real training, held against its own MLPerf log."""

import json

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.config.files import load_config
from support import mlperf_records

TARGET = 0.01  # of 64 words; below what a guess reaches


@pytest.mark.longest
def test_a_trial_is_a_training(tmp_path, tiny_config, synthetic_data, capsys):
    study = tmp_path / "study"
    words = ["tune", "--config", str(tiny_config), "--space", "around"]
    words += ["--data", str(synthetic_data), "--out", str(study), "--trials", "1"]
    words += ["--set", f"eval.target_accuracy={TARGET}"]
    assert main(words) == 0
    best = json.loads((study / "result.json").read_text())["best"]
    assert f"best: trial {best['trial']}, " in capsys.readouterr().out

    directory = study / "trials" / "trial_00000"
    given = load_config(directory / "trial.toml")
    ran = load_config(directory / "run_0" / "config.toml")
    assert ran == given and given.run.seed == 1 and given.run.max_steps == 20
    evaluations = mlperf_records(directory / "result_0.txt", "eval_accuracy")
    reached = [each for each in evaluations if each["value"] >= TARGET]
    assert best["samples"] == reached[0]["metadata"]["samples_count"] and best["trial"] == 0
    assert "target" in (directory / "train.log").read_text()
    tuned = load_config(study / "best.toml")
    assert tuned.optim == given.optim and tuned.schedule == given.schedule
    assert tuned.run == load_config(tiny_config).run
