"""Steps after which a config evaluates."""

from math import ceil

import pytest

from mlperf_bert.config.files import load_config
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
