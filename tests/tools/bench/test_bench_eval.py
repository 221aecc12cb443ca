"""`bench eval`: its shares follow from what it measured, and the made-up set is what it says."""

from pathlib import Path

import numpy as np
import pytest
from bench_cases import measured, tiny

from bert_tools.bench.synthetic import make_held_out
from mlperf_bert.data.shards import SampleReader

BRIEF = ("--steps", 3, "--seconds", 0.01, "--rounds", 2, "--samples", 48)


@pytest.mark.parametrize("step_mode", ["eager", "captured"])
def test_shares_follow_from_the_rates(step_mode: str) -> None:
    settings = (f"run.step_mode={step_mode}",)
    result, words, progress = measured("eval", *BRIEF, settings=settings)
    assert result["num_samples"] == 48
    assert result["interval_samples"] == 150_000  # MLPerf's formula at a global batch of 4
    assert result["floor_share"] == pytest.approx(48 / 3 / 150_000)
    training_s = 150_000 / result["train_samples_per_s"]
    assert result["share_of_training"] == pytest.approx(result["evaluation_s"] / training_s)
    assert result["share_of_run"] == pytest.approx(
        result["evaluation_s"] / (result["evaluation_s"] + training_s)
    )
    assert result["evaluation_samples_per_s"] == pytest.approx(48 / result["evaluation_s"])
    assert "of a run" in words
    assert progress.count("evaluation ") == 3


def test_held_out_set_fits_the_config(tmp_path: Path) -> None:
    config = tiny()
    index = make_held_out(tmp_path, config, 48)
    assert index.manifest.num_samples == 48
    assert index.manifest.vocab_size == config.model.vocab_size
    samples = SampleReader(tmp_path, index.manifest).read(np.arange(48))
    np.testing.assert_array_equal(samples.lengths, index.lengths)
    assert samples.lengths.max() <= config.data.max_seq_length
    assert samples.input_ids.max() < config.model.vocab_size
