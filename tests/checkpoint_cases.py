"""A checkpoint written at once, for tests that only want to have one."""

from pathlib import Path
from typing import Any

import torch

from mlperf_bert.checkpoint.manifest import CheckpointState, step_directory
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.optim.flat_optimizer import FlatOptimizer


def save_checkpoint(
    directory: Path,
    optimizer: FlatOptimizer,
    config: RunConfig,
    state: CheckpointState,
    info: RankInfo,
    device: torch.device,
    **options: Any,
) -> Path:
    """Write one below `directory`; every rank calls it. Raises CheckpointError."""
    writer = CheckpointWriter(directory, optimizer, config, info, device, **options)
    assert writer.begin(state)
    writer.finish()
    return step_directory(directory, state.step)
