"""A checkpoint written at once, for tests that only want to have one."""

from dataclasses import replace

import torch

from mlperf_bert.checkpoint.manifest import CheckpointState, step_directory
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.config.files import load_config
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.optimizers import make_optimizer_alone
from mlperf_bert.vocabulary.any_vocabulary import load_any_vocabulary
from support import TINY_CONFIG

CPU = torch.device("cpu")
ONE_RANK = RankInfo(0, 1, 0, 1, 0, "single")


def save_checkpoint(directory, optimizer, config, state, info, device, **options):
    """Write one below `directory`; every rank calls it. Raises CheckpointError."""
    writer = CheckpointWriter(directory, optimizer, config, info, device, **options)
    assert writer.begin(state)
    writer.finish()
    return step_directory(directory, state.step)


def trained(directory, words, *overrides):
    """A checkpoint as a run leaves it, of random weights: padding rows are like any other."""
    directory.mkdir()
    (directory / "tiny.toml").write_text(TINY_CONFIG)
    config = load_config(directory / "tiny.toml", overrides)
    wide = replace(config.model, initializer_range=0.2)
    model = BertForPretraining(wide, CPU, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    state = CheckpointState(
        step=7,
        samples=112,
        seed=3,
        mlm_accuracy=0.25,
        vocabulary_sha256=load_any_vocabulary(words).sha256,
    )
    optimizer = make_optimizer_alone(config.optim, model)
    return save_checkpoint(directory / "checkpoints", optimizer, config, state, ONE_RANK, CPU)
