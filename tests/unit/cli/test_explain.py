"""What `config --explain` says: evaluation points by the rule, and samples to expect."""

from math import ceil

import pytest

from mlperf_bert.__main__ import main
from mlperf_bert.cli.explain import evaluation_steps, in_words
from mlperf_bert.config.files import load_config
from support import CONFIGS

RECORD = CONFIGS / "open_adamw_dgxa100_128x8x16x1.toml"


def words(stem: str, *overrides: str) -> str:
    """The explanation as one line."""
    return " ".join(in_words(load_config(CONFIGS / f"{stem}.toml", overrides)).split())


def test_evaluation_points_of_the_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--explain", str(RECORD)]) == 0
    text = capsys.readouterr().out
    assert "at steps 20, 40, 60, 80, 100, 120, 139, 159, 179, 199" in text
    assert "1,024: 128 nodes of 8 ranks" in text
    assert "16,384 sequences: 1,024 x 16 (local batch) x 1 (accumulation)" in text
    assert "every 325,000 samples (MLPerf's rule)" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("batch", [448, 4096, 16_384, 16_416])
def test_point_k_is_the_first_step_that_reaches_k_intervals(batch: int) -> None:
    overrides = ["parallel.nodes=1", "parallel.ranks_per_node=1", "run.max_steps=3000"]
    sampler = ["data.sampler=uniform", f"parallel.local_batch_size={batch}"]
    config = load_config(RECORD, [*overrides, *sampler])
    interval = config.eval_interval_samples
    by_rule = [ceil(k * interval / batch) for k in range(1, 3000 * batch // interval + 1)]
    assert evaluation_steps(config) == sorted({*by_rule, 3000})


def test_an_interval_below_a_batch_is_every_step() -> None:
    overrides = ["eval.interval_samples=100", "run.max_steps=4"]
    assert evaluation_steps(load_config(RECORD, overrides)) == [1, 2, 3, 4]


def test_a_closed_run_learns_what_to_expect() -> None:
    text = words("dgxa100_128x8x4x1")
    assert "2,750,860 samples (672 steps) expected, between reference convergence points" in text
    assert "a mean of 2,651,583 (648 steps) at least" in text
    assert "warm-up of 256 steps that starts at step -76 and ends at 180" in text
    assert "stops before that" not in text
    assert "stops before that" in words("dgxa100_128x8x4x1", "run.max_steps=671")


def test_nothing_is_expected_of_other_runs() -> None:
    assert "expected" not in words("cpu_tiny")
    assert "expected" not in words("open_adamw_h200_1x1x448x1")


def test_quantiles_are_derived() -> None:
    assert "quantile: 64 from each of 64 quantiles" in words("open_adamw_dgxa100_128x8x4x1")
    assert "quantile: 1 from each of 32 quantiles" in words("cpu_tiny", "data.sampler=quantile")


def test_a_long_list_of_points_is_cut() -> None:
    text = words("cpu_tiny", "eval.interval_samples=32")
    assert "6000 times, at steps 1, 2, 3" in text
    assert text.endswith("39, 40 ... 6000")
