"""`bench eval`: its shares follow from what it measured, and the made-up set is what it says."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from bert_tools.bench import cli
from bert_tools.bench.evaluation import write_held_out
from bert_tools.bench.run_options import make_config
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.data.shards import SampleReader

ARGUMENTS = (
    *("eval", "--layers", "1", "--hidden", "32", "--heads", "2", "--vocab", "101"),
    *("--max-length", "32", "--batch", "4", "--threads", "1", "--device", "cpu", "--steps", "3"),
    *("--seconds", "0.01", "--rounds", "2", "--samples", "48"),
)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args([*ARGUMENTS, *arguments])


@pytest.mark.parametrize("step_mode", ["eager", "captured"])
def test_shares_follow_from_the_rates(step_mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(parse("--step-mode", step_mode, "--json")) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["schema_version"] == 1
    assert result["num_samples"] == 48
    assert result["interval_samples"] == 150_000  # MLPerf's formula at a global batch of 4
    assert result["floor_share"] == pytest.approx(48 / 3 / 150_000)
    training_s = 150_000 / result["train_samples_per_s"]
    assert result["share_of_training"] == pytest.approx(result["evaluation_s"] / training_s)
    assert result["share_of_run"] == pytest.approx(
        result["evaluation_s"] / (result["evaluation_s"] + training_s)
    )
    assert result["evaluation_samples_per_s"] == pytest.approx(48 / result["evaluation_s"])
    assert printed.err.count("evaluation ") == 3


def test_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(parse()) == 0
    assert "of a run" in capsys.readouterr().out


def test_held_out_set_fits_the_config(tmp_path: Path) -> None:
    config = make_config(parse())
    index = write_held_out(tmp_path, config, 48)
    assert index.manifest.num_samples == 48
    assert index.manifest.vocab_size == config.model.vocab_size
    samples = SampleReader(tmp_path, index.manifest).read(np.arange(48))
    np.testing.assert_array_equal(samples.lengths, index.lengths)
    assert samples.lengths.max() <= config.data.max_seq_length
    assert samples.input_ids.max() < config.model.vocab_size


@pytest.mark.parametrize("name", ["samples", "rounds"])
def test_nothing_to_measure_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name}: is 0"):
        cli.run(parse(f"--{name}", "0"))
