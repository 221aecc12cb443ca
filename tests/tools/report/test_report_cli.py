"""`mlperf_bert report --doctor`: what it prints and its exit status."""

import json
from pathlib import Path

import pytest
from run_cases import BATCH_16K, PUBLISHED, records_16k, write_run

from mlperf_bert.__main__ import main


def test_a_run_on_track_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", BATCH_16K, records_16k(PUBLISHED), ended="success")
    assert main(["report", "--doctor", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{run}/run_0: on track",
        "  reached 0.72 after 2,932,736 samples, 1.01 times the 2,916,352 published for this batch",
    ]


def test_a_run_that_is_off_in_words_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = records_16k([(step, 0.625) for step in range(20, 180, 20)])
    run = write_run(tmp_path / "run", BATCH_16K, stuck)
    assert main(["report", "--doctor", str(run)]) == 1
    words = capsys.readouterr().out
    assert ": off\n" in words and "     do: look for duplicates: mlperf_bert verify" in words
    assert main(["report", "--doctor", str(run), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["schema_version"], found["verdict"]) == (1, "off")
    assert found["causes"][0]["name"] == "repeated_samples" and found["slowness"] == []


def test_the_guess_comes_from_the_data(
    tmp_path: Path, tiny_config: Path, synthetic_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low = [{**each, "mlm_accuracy": 0.01, "loss": 5.0} for each in records_16k(PUBLISHED)]
    run = write_run(tmp_path / "run", tiny_config, low)
    options = ["report", "--doctor", str(run), "--data", str(synthetic_data), "--json"]
    assert main(options) == 3
    assert "stays_at_guess" in capsys.readouterr().out


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--doctor"]):
        assert main(["report", *options, str(tmp_path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
