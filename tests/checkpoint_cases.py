"""A checkpoint written at once, for tests that only want to have one."""

from mlperf_bert.checkpoint.manifest import step_directory
from mlperf_bert.checkpoint.writer import CheckpointWriter


def save_checkpoint(
    directory,
    optimizer,
    config,
    state,
    info,
    device,
    **options,
):
    """Write one below `directory`; every rank calls it. Raises CheckpointError."""
    writer = CheckpointWriter(directory, optimizer, config, info, device, **options)
    assert writer.begin(state)
    writer.finish()
    return step_directory(directory, state.step)
