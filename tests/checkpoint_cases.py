"""A checkpoint written at once, for tests that only want to have one."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mlperf_bert.checkpoint.manifest import CheckpointState, step_directory
from mlperf_bert.checkpoint.writer import NO_FP8, CheckpointWriter
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
    fp8_state: Mapping[str, Tensor] = NO_FP8,
) -> Path:
    """Write one below `directory`; every rank calls it. Raises CheckpointError."""
    writer = CheckpointWriter(directory, optimizer, config, info, device, fp8_state=fp8_state)
    assert writer.begin(state)
    writer.finish()
    return step_directory(directory, state.step)
