"""One search whose trials are real trainings, held against their own MLPerf logs."""

import json
from pathlib import Path

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.config_io import load_config
from support import mlperf_records

TARGET = 0.02  # of 64 words; below what anything learnt reaches


def test_trials_are_trainings(
    tmp_path: Path,
    tiny_config: Path,
    synthetic_data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study = tmp_path / "study"
    words = ["tune", "--config", str(tiny_config), "--space", "around", "--json"]
    words += ["--data", str(synthetic_data), "--study", str(study), "--trials", "2"]
    words += ["--repeats", "0", "--set", f"eval.target_accuracy={TARGET}"]
    assert main(words) == 0
    best = json.loads(capsys.readouterr().out)["arms"][0]["best"]

    needed = []
    for trial in (0, 1):
        directory = study / "trials" / f"trial_{trial:05d}"
        given = load_config(directory / "trial.toml")
        ran = load_config(directory / "run_0" / "config.toml")
        assert ran == given and given.run.seed == 1 and given.run.max_steps == 20
        evaluations = mlperf_records(directory / "result_0.txt", "eval_accuracy")
        reached = [each for each in evaluations if each["value"] >= TARGET]
        needed.append(reached[0]["metadata"]["samples_count"] if reached else 1_000_000)
        assert "target" in (directory / "train.log").read_text()
    assert best["samples"] == min(needed) and best["trial"] == needed.index(min(needed))
    tuned = load_config(study / "best.toml")
    won = load_config(study / "trials" / f"trial_{best['trial']:05d}" / "trial.toml")
    assert tuned.optim == won.optim and tuned.schedule == won.schedule
    assert tuned.run == load_config(tiny_config).run
