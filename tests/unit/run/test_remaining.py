"""The remaining time: the limit, the estimate to the target, and when there is none."""

import json
from statistics import median

import pytest

from mlperf_bert.config.files import load_config
from mlperf_bert.run.remaining import estimate_remaining, samples_to_target
from run_cases import record
from support import CONFIGS, REPOSITORY

LOGS = (
    *sorted(REPOSITORY.glob("logs/2026-11-21-cpu-tiny/ten-seeds/result_?.txt")),
    *sorted(REPOSITORY.glob("logs/2026-11-22-ten-runs/result_?.txt")),
    *sorted(REPOSITORY.glob("results/cpu_2core_pytorch/bert/result_?.txt")),
)


def evaluations_in(log):
    """(samples, accuracy) of each evaluation in an MLPerf log."""
    records = [json.loads(line.partition("{")[1] + line.partition("{")[2]) for line in log.open()]
    return [
        (each["metadata"]["epoch_num"], each["value"])
        for each in records
        if each["key"] == "eval_accuracy"
    ]


def test_estimates_of_recorded_runs_are_right_within_a_factor_of_two():
    ratios = []
    for log in LOGS:
        found = evaluations_in(log)
        end, target = found[-1]
        interval = found[0][0]
        settings = [f"eval.target_accuracy={target}", f"eval.interval_samples={interval}"]
        config = load_config(CONFIGS / "cpu_tiny.toml", settings)
        for count in range(2, len(found)):
            samples = found[count - 1][0]
            estimate = samples_to_target(config, samples, found[:count])
            ratios.append(estimate / (end - samples))
    assert len(LOGS) == 30 and len(ratios) == 175
    assert sum(0.5 <= ratio <= 2 for ratio in ratios) > 0.95 * len(ratios)
    assert 0.8 < median(ratios) < 1.25


@pytest.fixture
def config(tiny_config):
    """20 steps of 16 samples, an evaluation every 16 samples, and a target of 0.99."""
    return load_config(tiny_config, ["eval.interval_samples=16"])


def test_words(config, tiny_config):
    def words(config, *evaluations):
        remaining = estimate_remaining(config, [record(10)], evaluations)
        return remaining.in_words(lambda seconds: f"{seconds:.1f} s")

    assert words(config) == words(config, (80, 0.3)) == "limit 0.2 s"
    assert words(config, (80, 0.3), (160, 0.2)) == "limit 0.2 s"  # no rise
    assert words(config, (80, 0.3), (160, 0.69)) == "about 0.1 s to target, limit 0.2 s"
    without = load_config(tiny_config, ["eval.target_accuracy=none"])
    assert words(without, (80, 0.3), (160, 0.69)) == "0.2 s to the last step"
    assert estimate_remaining(config, [record(10, samples_per_s=0.0)], ()) is None


def test_the_target_is_reached_at_an_evaluation(config):
    assert samples_to_target(config, 160, [(80, 0.50), (160, 0.90)]) == 32  # not 18
    assert samples_to_target(config, 175, [(80, 0.50), (160, 0.98)]) == 1
    # The less steep of the lines to the two evaluations before counts.
    assert samples_to_target(config, 240, [(80, 0.50), (160, 0.54), (240, 0.90)]) == 48
    assert samples_to_target(config, 240, [(80, 0.10), (160, 0.80), (240, 0.90)]) == 80
