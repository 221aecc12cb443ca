"""Loading through nvidia-dali: the same batches bit for bit, and one line where it is missing."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.data.balance import StepPlanner
from mlperf_bert.data.gather import Gatherer
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.loader import DirectSource, Loader
from mlperf_bert.data.loader_dali import DaliSource
from mlperf_bert.data.sampler import UniformSampler
from mlperf_bert.data.shards import SampleReader
from shard_sets import assert_same_batch, write_set

CPU = torch.device("cpu")


@pytest.fixture
def direct(tmp_path: Path) -> tuple[StepPlanner, DirectSource]:
    manifest = write_set(tmp_path / "set", [(9, "<u2"), (8, "<u4"), (7, "<u2")], seed=1)
    index = LengthIndex.open(tmp_path / "set")
    planner = StepPlanner(
        UniformSampler(manifest.num_samples, 8, seed=1),
        index.lengths,
        index.masked_counts,
        world_size=1,
        grad_accum_steps=2,
        loss_normalization="per_rank",
    )
    return planner, DirectSource(Gatherer(SampleReader(tmp_path / "set", manifest)), 0)


def test_batches_are_the_same_bit_for_bit(direct: tuple[StepPlanner, DirectSource]) -> None:
    pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
    planner, source = direct
    with Loader(planner, DaliSource(source, CPU), CPU) as loader:
        # All are kept until the end: none may lie in memory that a later one overwrites.
        steps = [step for _, step in zip(range(8), loader, strict=False)]
    for step in steps:
        expected = source.micro_batches(planner.plan(step.plan.step))
        assert len(step.micro_batches) == len(expected) == 2
        for batch, wanted in zip(step.micro_batches, expected, strict=True):
            assert_same_batch(batch, wanted)
    assert len(np.unique([step.plan.step for step in steps])) == 8


def test_without_dali_the_error_says_how_to_get_it(
    direct: tuple[StepPlanner, DirectSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(ConfigError, match=r"data\.loader: .*tools/venv\.sh dali"):
        DaliSource(direct[1], CPU)
