"""What a burn-in trains: by a GPU's memory, on a CPU, and of a config that is given."""

from pathlib import Path

import pytest
import torch

from bert_tools.doctor import burn_in_config
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import has_bert_large_sizes
from support import CONFIGS

GIB = 2**30


@pytest.mark.parametrize(
    ("memory_gib", "batch"), [(139, 448), (79, 240), (39, 96), (15, 16), (11, 3), (4, 1)]
)
def test_the_batch_goes_by_memory(memory_gib: float, batch: int) -> None:
    assert burn_in_config.batch_for(int(memory_gib * GIB)) == batch


def test_a_gpu_tries_captured_then_eager_then_half_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    tried = list(burn_in_config.candidates(None, torch.device("cuda", 0), 11 * GIB))
    rows = [(config.parallel.local_batch_size, config.run.step_mode) for config in tried]
    assert rows == [(3, "captured"), (3, "eager"), (1, "captured"), (1, "eager")]
    assert {config.model.precision for config in tried} == {"fp16"}
    assert all(has_bert_large_sizes(config.model) for config in tried)


def test_a_cpu_trains_a_small_model() -> None:
    (config,) = burn_in_config.candidates(None, torch.device("cpu"), 0)
    assert (config.model.num_layers, config.model.hidden_size) == (4, 256)
    assert (config.model.precision, config.run.step_mode) == ("fp32", "eager")
    assert not has_bert_large_sizes(config.model)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_can_be_trained_as_one_rank_of_it(path: Path) -> None:
    given = load_config(path)
    (config,) = burn_in_config.candidates(given, torch.device("cuda", 0), 0)
    assert config.parallel.world_size == 1
    assert config.parallel.local_batch_size == given.parallel.local_batch_size
    assert config.model == given.model
