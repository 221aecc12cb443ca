"""model.objective "mlm": `transformers`' BertForMaskedLM, with no weight that gets no gradient."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model_cases import (
    CPU,
    TINY,
    gradients,
    hugging_face_twin,
    our_loss,
    ragged_batch,
    scattered_model,
)

from bert_tools.bench.flops import done_flops, model_flops
from bert_tools.bench.peer import padded_inputs
from bert_tools.plan.buckets_model import parameter_shapes
from mlperf_bert.checkpoint.load import load_weights
from mlperf_bert.checkpoint.manifest import resolve
from mlperf_bert.checkpoint.state import read_state
from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.config.files import load_config
from mlperf_bert.model.bert import BertForPretraining
from resume_cases import MISSED, run_train

ALONE = replace(TINY, objective="mlm")
LENGTHS = (7, 31, 12, 64, 5, 40, 33)
NEXT_SENTENCE = ("bert.pooler.", "cls.seq_relationship.")


@pytest.mark.parametrize("attention", ["reference", "grouped", "packed"])
def test_it_is_the_masked_lm_of_transformers(attention: str) -> None:
    config = replace(ALONE, attention=attention)
    model = scattered_model(config, spread=0.2, dtype=torch.float64)
    batch = ragged_batch(LENGTHS)
    padded = padded_inputs(batch, batch.max_seqlen)
    labels = padded.pop("labels")
    padded.pop("next_sentence_label")
    twin = hugging_face_twin(model)
    theirs = twin(**padded).logits[labels != -100]
    ours = model(batch)
    assert ours.nsp is None
    assert float((ours.mlm - theirs).detach().abs().max()) < 1e-9
    plain = F.cross_entropy(theirs, labels[labels != -100])
    loss = our_loss(model, batch)
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-12)
    found, expected = gradients(model, loss), gradients(twin, plain)
    assert set(found) <= set(expected)
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], rtol=0, atol=1e-10), name
        assert gradient.any(), name


def test_only_what_next_sentences_need_is_missing() -> None:
    both, alone = (set(BertForPretraining(config, CPU).state_dict()) for config in (TINY, ALONE))
    assert both - alone == {name for name in both if name.startswith(NEXT_SENTENCE)}
    assert not alone - both
    shapes = {
        name: tuple(each.shape)
        for name, each in BertForPretraining(ALONE, CPU).state_dict().items()
    }
    assert parameter_shapes(ALONE) == shapes


@pytest.mark.parametrize("head", ["full", "chunked"])
def test_the_loss_is_the_masked_lm_part(head: str) -> None:
    """Of the same weights: next-sentence prediction adds, and changes nothing of it."""
    both = scattered_model(replace(TINY, head=head), spread=0.1, dtype=torch.float64)
    alone = BertForPretraining(replace(ALONE, head=head), CPU).double()
    alone.load_state_dict(
        {
            name: each
            for name, each in both.state_dict().items()
            if not name.startswith(NEXT_SENTENCE)
        }
    )
    batch = ragged_batch(LENGTHS)
    expected, found = both(batch, "loss_sums"), alone(batch, "loss_sums")
    assert found.nsp is None
    assert float(found.mlm.detach()) == pytest.approx(float(expected.mlm.detach()), rel=1e-12)


def test_flops_leave_out_the_pooler() -> None:
    batch = ragged_batch(LENGTHS)
    both, alone = (
        model_flops(config, batch.lengths, batch.masked_counts) for config in (TINY, ALONE)
    )
    assert alone.pooler == 0 < both.pooler
    assert alone.total == both.total - both.pooler
    assert done_flops(ALONE, batch).total < done_flops(TINY, batch).total


def test_weights_of_both_tasks_begin_masked_lm_alone_but_not_the_other_way(
    tiny_config: Path, synthetic_data: Path, tmp_path: Path
) -> None:
    few = ("run.max_steps=2", "schedule.warmup_steps=1", "schedule.decay_steps=2")
    for objective in ("mlm_nsp", "mlm"):
        directory = tmp_path / objective
        settings = (*few, f"model.objective={objective}")
        assert run_train(tiny_config, synthetic_data, directory, *settings) == MISSED
    checkpoints = {name: tmp_path / name / "run_0/checkpoints" for name in ("mlm_nsp", "mlm")}
    digest = read_state(resolve(checkpoints["mlm"])).vocabulary_sha256
    config = load_config(tiny_config).model
    alone = BertForPretraining(replace(config, objective="mlm"), CPU, seed=9)
    load_weights(alone, checkpoints["mlm_nsp"], digest)
    both = BertForPretraining(config, CPU, seed=8)
    load_weights(both, checkpoints["mlm_nsp"], digest)
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, both.state_dict()[name]), name
    with pytest.raises(CheckpointError, match=r"bert\.pooler\.dense\.bias is missing"):
        load_weights(both, checkpoints["mlm"], digest)
