"""The captured step on a CPU: static inputs, padding, restored state, dropout by key."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from graph_cases import (
    CPU,
    LARGE,
    SEQUENCES,
    SMALL,
    Run,
    batch_of,
    state_of,
    to_large,
    to_smallest,
)
from mlperf_bert.data.batch import pad
from mlperf_bert.errors import TARGET_MISSED, ConfigError
from mlperf_bert.step.captured import CapturedStep, StaticInputs, synthetic_batch, warm_up
from mlperf_bert.step.eager import EagerStep
from resume_cases import DROPOUT, MODERN, run_train
from support import metrics_records


def captured_run(config, *overrides, shapes=(LARGE,)):
    """Prepared: a capture updates nothing on a CPU, so there is nothing to restore."""
    run = Run(config, *overrides, shapes=shapes)
    run.step.prepare(lambda shape: pad(synthetic_batch(run.config, shape), shape))
    return run


@pytest.mark.parametrize("architecture", [(), MODERN], ids=["bert", "modern"])
def test_captured_is_bit_equal_to_eager_on_the_same_batches(tiny_config, architecture):
    settings = (*DROPOUT, *architecture)
    eager, captured = (
        Run(tiny_config, *settings),
        captured_run(tiny_config, *settings, shapes=(SMALL, LARGE)),
    )
    assert isinstance(eager.step, EagerStep) and isinstance(captured.step, CapturedStep)
    steps = range(1, 51)
    with captured.step:
        assert captured.losses(steps, to_smallest) == eager.losses(steps, to_smallest)
    assert torch.equal(captured.weights, eager.weights)


@pytest.mark.parametrize("overrides", [(), DROPOUT], ids=["without dropout", "with dropout"])
def test_padding_to_capacity_changes_nothing_but_rounding(tiny_config, overrides):
    unpadded, padded = Run(tiny_config, *overrides), captured_run(tiny_config, *overrides)
    steps = range(1, 31)
    found, expected = padded.losses(steps, to_large), unpadded.losses(steps)
    assert expected[0] - min(expected) > 0.1  # it learns
    assert found == pytest.approx(expected, rel=0, abs=1e-5)


def test_batches_that_no_capacity_holds_run_unpadded(tiny_config):
    eager, captured = (
        Run(tiny_config, *DROPOUT),
        captured_run(tiny_config, *DROPOUT, shapes=(SMALL,)),
    )
    steps = range(1, 4)
    assert captured.losses(steps) == eager.losses(steps)


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


def test_static_inputs_keep_nothing_of_the_batch_before():
    inputs = StaticInputs(pad(batch_of(1), LARGE), 1, CPU)
    (static,) = inputs.batches
    static.block.fill_(0xFF)
    expected = pad(batch_of(2), LARGE)
    inputs.overwrite((expected,))
    assert torch.equal(static.block, expected.block)
    (now,) = inputs.batches
    assert now.input_ids.data_ptr() == static.input_ids.data_ptr()
    assert (now.lengths, now.masked_counts) == (expected.lengths, expected.masked_counts)


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
        ((), "a forward of 128 tokens in 4 sequences"),
    ],
    ids=["captured", "eager"],
)
def test_an_update_that_takes_too_much_memory_names_its_size(
    tiny_config, shapes, size, monkeypatch
):
    run = Run(tiny_config, shapes=shapes)

    def prepare(_make_batch):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr(run.step, "prepare", prepare)
    with pytest.raises(ConfigError, match=size) as raised:
        warm_up(run.config, run.step, run.model, run.optimizer, CPU)
    assert str(raised.value).startswith("parallel.local_batch_size: 4: no memory left")
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_dropout_is_the_same_after_a_restart(tiny_config):
    whole = captured_run(tiny_config, *DROPOUT)
    first = whole.losses(range(1, 4), to_large)
    state = state_of(whole)
    rest = whole.losses(range(4, 9), to_large)

    restarted = captured_run(tiny_config, *DROPOUT)
    torch.manual_seed(999)  # no stream of torch's has a part in it
    restarted.model.load_state_dict({name: state[name] for name in whole.model.state_dict()})
    for name, tensor in restarted.optimizer.changed_by_step().items():
        tensor.copy_(state[name])
    assert restarted.losses(range(4, 9), to_large) == rest
    assert len(set(first + rest)) == 8


def test_dropout_is_the_same_under_accumulation(tiny_config):
    accumulating = Run(tiny_config, *DROPOUT, "parallel.grad_accum_steps=2")
    whole = Run(tiny_config, *DROPOUT)
    steps = range(1, 21)
    cut_up = [float(accumulating.step(step, halves_of(batch_of(step))).loss) for step in steps]
    assert cut_up == pytest.approx(whole.losses(steps), rel=0, abs=1e-5)


def halves_of(batch):
    """The first and the last sequences of a batch."""
    pairs, middle = SEQUENCES // 2, int(batch.cu_seqlens[SEQUENCES // 2])
    masked = sum(batch.masked_counts[:pairs])

    def part(tokens, places, sequences):
        first = tokens.start or 0
        lengths = batch.lengths[sequences]
        return replace(
            batch,
            input_ids=batch.input_ids[tokens],
            position_ids=batch.position_ids[tokens],
            token_type_ids=batch.token_type_ids[tokens],
            cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
            lengths=lengths,
            masked_counts=batch.masked_counts[sequences],
            sample_ids=batch.sample_ids[sequences],
            masked_token_index=batch.masked_token_index[places] - first,
            labels=batch.labels[places],
            next_sentence_label=batch.next_sentence_label[sequences],
        )

    return (
        part(slice(0, middle), slice(0, masked), slice(0, pairs)),
        part(slice(middle, None), slice(masked, None), slice(pairs, None)),
    )


@pytest.mark.parametrize(("sampler", "rule"), [("uniform", "adamw"), ("quantile", "muon")])
def test_a_captured_run_has_the_losses_of_an_eager_one(
    tiny_config, synthetic_data, tmp_path, sampler, rule
):
    found = {}
    for mode in ("eager", "captured"):
        sets = (f"run.step_mode={mode}", f"data.sampler={sampler}", f"optim.name={rule}")
        done = run_train(tiny_config, synthetic_data, tmp_path / mode, *sets, *DROPOUT)
        assert done == TARGET_MISSED
        found[mode] = metrics_records(tmp_path / mode)
        assert sum(record["unpadded_steps"] for record in found[mode]) == 0
    losses = {mode: [record["loss"] for record in rows] for mode, rows in found.items()}
    assert {row["capacity_waste"] for row in found["eager"]} == {0}
    wastes = [row["capacity_waste"] for row in found["captured"]]
    assert all(0 <= waste < 0.2 for waste in wastes) and sum(wastes) > 0
    assert losses["captured"] == pytest.approx(losses["eager"], rel=0, abs=1e-5)
    accuracies = {mode: [row["mlm_accuracy"] for row in rows] for mode, rows in found.items()}
    assert accuracies["captured"] == pytest.approx(accuracies["eager"], abs=0.01)
