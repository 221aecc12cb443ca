"""Steps after which a config evaluates, and what the closed division requires of evaluations."""

from contextlib import nullcontext
from math import ceil
from types import SimpleNamespace

import pytest

from mlperf_bert.config.files import load_config
from mlperf_bert.data.set_checks import _check_closed_sets
from mlperf_bert.errors import ConfigError
from mlperf_bert.evaluation.evaluate import Accuracy, Evaluated
from mlperf_bert.train import _reached
from support import CONFIGS

RECORD = CONFIGS / "open_adamw_dgxa100_128x8x16x1.toml"


@pytest.mark.parametrize("batch", [448, 4096, 16_384, 16_416])
def test_point_k_is_the_first_step_that_reaches_k_intervals(batch):
    overrides = ["parallel.nodes=1", "parallel.ranks_per_node=1", "run.max_steps=3000"]
    sampler = ["data.sampler=uniform", f"parallel.local_batch_size={batch}"]
    config = load_config(RECORD, [*overrides, *sampler])
    interval = config.eval_interval_samples
    found = [step for step in range(1, 3001) if config.evaluation_is_due(step * batch)]
    assert found == [ceil(k * interval / batch) for k in range(1, 3000 * batch // interval + 1)]
    often = load_config(RECORD, ["eval.interval_samples=100"])  # less than a batch
    samples = often.parallel.global_batch_size
    assert often.evaluation_is_due(samples) and often.evaluation_is_due(2 * samples)


def test_the_evaluation_after_the_last_step_of_a_closed_run_counts_only_if_it_was_due():
    closed = load_config(CONFIGS / "dgxa100_1x8x56x1.toml")
    batch = closed.parallel.global_batch_size
    due = ceil(closed.eval_interval_samples / batch) * batch
    free = load_config(CONFIGS / "dgxa100_1x8x56x1.toml", ["mlperf.enforce_rules=false"])
    for samples, counts in ((due, True), (due + batch, False)):
        evaluated = Evaluated(samples, Accuracy(73, 100, 0, 0), seconds=1.0)
        assert (_reached(closed, evaluated), _reached(free, evaluated)) == (counts, True)


@pytest.mark.parametrize(
    ("train", "held_out", "wrong"),
    [
        ((512, 76, 5000), (512, 76, 10_000), None),
        ((128, 20, 5000), (512, 76, 10_000), "train has max_seq_length = 128, but .* requires 512"),
        ((512, 76, 5000), (512, 20, 10_000), "eval has max_predictions = 20, but .* requires 76"),
        ((512, 76, 5000), (512, 76, 2093), "eval has num_samples = 2093, but .* requires 10000"),
    ],
)
def test_closed_sets_must_be_those_of_the_rules(train, held_out, wrong, tmp_path):
    config = load_config(CONFIGS / "dgxa100_1x8x56x1.toml")
    names = ("max_seq_length", "max_predictions", "num_samples")
    sets = [SimpleNamespace(**dict(zip(names, each, strict=True))) for each in (train, held_out)]
    context = pytest.raises(ConfigError, match=wrong) if wrong else nullcontext()
    with context:
        _check_closed_sets(config, *sets, tmp_path)
