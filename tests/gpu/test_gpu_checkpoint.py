"""Checkpoints on a GPU: copies are queued behind a step and written while the next ones run."""

import pytest
import torch

from graph_cases import ONE_RANK
from mlperf_bert.checkpoint.load import load_checkpoint, restore_rank_states
from mlperf_bert.checkpoint.manifest import CheckpointState
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.config.files import load_config
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.optimizers import make_optimizer_alone

DEVICE = torch.device("cuda", 0)
STATE = CheckpointState(step=3, samples=48, seed=1, mlm_accuracy=None, vocabulary_sha256="ab")


def update(model, optimizer, times):
    for _ in range(times):
        for parameter in model.parameters():
            parameter.grad = torch.rand_like(parameter)
        rate = torch.tensor(1e-2, dtype=torch.float64, device=DEVICE)
        nothing = torch.zeros((), device=DEVICE)
        optimizer.step(rate, gradient_factor=nothing + 1, skip=nothing)


def test_what_is_written_is_the_state_of_its_step(tiny_config, tmp_path):
    file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    config = load_config(tiny_config)
    model = BertForPretraining(config.model, DEVICE, seed=1)
    optimizer = make_optimizer_alone(config.optim, model)
    update(model, optimizer, 3)
    weights = optimizer.exact_weights()
    state = {name: each.clone() for name, each in optimizer.flat_state().items()}
    writer = CheckpointWriter(tmp_path / "checkpoints", optimizer, config, ONE_RANK, DEVICE)
    assert writer.begin(STATE)
    expected = torch.rand(8, device=DEVICE)  # the first draw after the checkpoint
    update(model, optimizer, 20)  # while it is written
    writer.finish()
    saved = tmp_path / "checkpoints/step_00000003"
    for name, tensor in file.load_file(saved / "model.safetensors").items():
        assert torch.equal(tensor, weights[name])
    other = BertForPretraining(config.model, DEVICE, seed=2)
    resumed = make_optimizer_alone(config.optim, other)
    found = load_checkpoint(resumed, saved, "ab", ONE_RANK)
    for name, each in resumed.flat_state().items():
        assert torch.equal(each, state[name])
    restore_rank_states(saved, found, other, ONE_RANK, DEVICE)
    assert torch.equal(torch.rand(8, device=DEVICE), expected)
