"""The captured step on a CPU: equal to an eager one, padding, what the init phase leaves."""

from contextlib import contextmanager

import pytest
import torch

from graph_cases import CPU, LARGE, SMALL, Run, batch_of, state_of, to_large, to_smallest
from mlperf_bert.data.batch import pad
from mlperf_bert.errors import ConfigError
from mlperf_bert.step.captured import CapturedStep, synthetic_batch, warm_up
from mlperf_bert.step.eager import EagerStep
from resume_cases import DROPOUT, MODERN


def captured_run(config, *overrides, shapes=(LARGE,)):
    """Prepared: a capture updates nothing on a CPU, so there is nothing to restore."""
    run = Run(config, *overrides, shapes=shapes)
    run.step.prepare(lambda shape: pad(synthetic_batch(run.config, shape), shape))
    return run


@pytest.mark.parametrize("architecture", [(), MODERN], ids=["bert", "modern"])
def test_captured_is_bit_equal_to_eager_on_the_same_batches(tiny_config, architecture):
    settings = (*DROPOUT, *architecture)
    eager = Run(tiny_config, *settings)
    captured = captured_run(tiny_config, *settings, shapes=(SMALL, LARGE))
    assert isinstance(eager.step, EagerStep) and isinstance(captured.step, CapturedStep)
    steps = range(1, 13)
    with captured.step:
        assert captured.losses(steps, to_smallest) == eager.losses(steps, to_smallest)
        steps = range(13, 16)  # batches that were padded to no shape run as they are
        assert captured.losses(steps) == eager.losses(steps)
    assert torch.equal(captured.weights, eager.weights)


@contextmanager
def poisoned(model, batch):
    """NaN in all memory that is not written, garbage in dummies."""

    def spoil_dummies(_module, _inputs, hidden):
        num_tokens = batch.input_ids.shape[0]
        garbage = torch.full_like(hidden, 1e4)
        return torch.cat((hidden[:num_tokens], garbage[num_tokens:]))

    hook = model.body.embeddings.register_forward_hook(spoil_dummies)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty makes with NaN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        hook.remove()


@pytest.mark.parametrize("settings", [DROPOUT, MODERN], ids=["bert", "modern"])
def test_poisoned_padding_changes_nothing(tiny_config, settings):
    clean, spoilt = (captured_run(tiny_config, *settings) for _ in range(2))
    for step in range(1, 6):
        batch = batch_of(step)
        (expected,) = clean.losses(range(step, step + 1), to_large)
        with poisoned(spoilt.model, batch):
            (found,) = spoilt.losses(range(step, step + 1), to_large)
        assert found == expected
    assert torch.equal(spoilt.weights, clean.weights)


@pytest.mark.parametrize("shapes", [(), (SMALL, LARGE)], ids=["eager", "captured"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_init_phase_leaves_every_bit_of_state(tiny_config, precision, shapes):
    run = Run(tiny_config, *DROPOUT, f"model.precision={precision}", shapes=shapes)
    run.losses(range(1, 3))  # state that is not all zero
    before = state_of(run)
    warm_up(run.config, run.step, run.model, run.optimizer, CPU)
    after = state_of(run)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ((SMALL, LARGE), "the captured capacity of 160 tokens in 4 sequences"),
        ((), "a micro-batch of 128 tokens in 4 sequences"),
    ],
    ids=["captured", "eager"],
)
def test_an_update_without_memory_names_its_size(tiny_config, shapes, size, monkeypatch):
    run = Run(tiny_config, shapes=shapes)

    def prepare(_make_batch):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(run.step, "prepare", prepare)
    with pytest.raises(ConfigError, match=size) as raised:
        warm_up(run.config, run.step, run.model, run.optimizer, CPU)
    problem = f"parallel.local_batch_size: 4 needs {size}, which exceeds the GPU's memory; "
    assert str(raised.value).startswith(problem)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
