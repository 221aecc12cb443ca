"""The whole model: size, names, initial weights, dropout, edge cases; of masked LM alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mlperf_logging import compliance_checker

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import pad
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.model.bert import (
    BertForPretraining,
    tensorflow_name,
)
from mlperf_bert.model.layers import correct_predictions
from model_cases import (
    CPU,
    TINY,
    gradients,
    loss_sums,
    our_loss,
    ragged_batch,
    scattered_model,
    worst_gradient_difference,
)

META = torch.device("meta")
RULES = Path(compliance_checker.__file__).parent


def test_bert_large_has_the_published_number_of_parameters():
    model = BertForPretraining(ModelSection(), META)
    assert sum(parameter.numel() for parameter in model.parameters()) == 336_232_258
    for objective, architecture in (("mlm_nsp", "bert"), ("mlm", "bert"), ("mlm", "modern")):
        section = ModelSection(objective=objective, architecture=architecture)
        parameters = BertForPretraining(section, META).parameters()
        assert section.num_parameters == sum(each.numel() for each in parameters)


@pytest.mark.parametrize("ruleset", ["1.1.0", "2.0.0", "2.1.0"])
def test_bert_large_has_the_tensors_of_mlperfs_rules(ruleset):
    rules = (RULES / f"training_{ruleset}" / "closed_bert.yaml").read_text()
    asked_for = re.findall(r'"((?:bert|cls)/[^"]+)"', rules)
    ours = [tensorflow_name(name) for name in BertForPretraining(ModelSection(), META).state_dict()]
    assert len(asked_for) == 398
    assert sorted(ours) == sorted(asked_for)


def test_initial_weights_come_from_the_seed_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = BertForPretraining(TINY, CPU, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(6)
    second = BertForPretraining(TINY, CPU)
    assert not torch.equal(first.bert.pooler.dense.weight, second.bert.pooler.dense.weight)
    second.reset_parameters(torch.Generator().manual_seed(3))
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)


def test_initial_weights_have_their_distribution():
    config = replace(TINY, vocab_size=4096, initializer_range=0.03)
    for name, value in BertForPretraining(config, CPU).state_dict().items():
        if name.endswith("bias"):
            assert not value.any()
        elif "LayerNorm" in name:
            assert (value == 1).all()
        else:
            assert abs(float(value.std()) / 0.03 - 1) < 4 / value.numel() ** 0.5
            assert abs(float(value.mean())) < 4 * 0.03 / value.numel() ** 0.5


@pytest.mark.parametrize("attention", ["reference", "grouped"])
def test_dropout_acts_in_training_and_not_in_evaluation(attention):
    batch = ragged_batch((9, 30, 12))
    plain = scattered_model(replace(TINY, attention=attention), spread=0.1)
    for field in ("hidden_dropout", "attention_dropout"):
        dropping = BertForPretraining(replace(plain.config, **{field: 0.5}), CPU)
        dropping.load_state_dict(plain.state_dict())
        assert not torch.allclose(dropping(batch).mlm, plain(batch).mlm)
        dropping.eval()
        torch.testing.assert_close(dropping(batch), plain(batch), rtol=0, atol=0)


@pytest.mark.parametrize("slots", [5, 9])  # 9: most are empty
@pytest.mark.parametrize("attention", ["reference", "grouped"])
def test_padding_adds_nothing(attention, slots):
    batch = ragged_batch((9, 30, 12))
    shape = StaticShape(
        tokens=54 if slots == 9 else 96, sequences=slots, masked=14, max_seqlen=32, max_masked=6
    )
    config = replace(TINY, attention=attention, hidden_dropout=0.2, attention_dropout=0.3)
    model = scattered_model(config, spread=0.1, dtype=torch.float64)
    losses = [our_loss(model, each) for each in (batch, pad(batch, shape))]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=0)
    apart = worst_gradient_difference(*(gradients(model, loss) for loss in losses))
    assert apart < 1e-9


def test_no_masked_positions():
    batch = ragged_batch((9, 12), masked_share=0.0)
    model = scattered_model(TINY, spread=0.1)
    logits = model(batch)
    assert logits.mlm.shape == (0, 104)
    assert correct_predictions(logits, batch).shape == (0,)
    sums = loss_sums(logits, batch)
    assert sums.mlm.item() == 0
    # Every parameter has a gradient, or DistributedDataParallel would wait for it.
    grads = gradients(model, sums.mlm + sums.nsp)
    assert all(grad.isfinite().all() for grad in grads.values())
    assert not grads["cls.predictions.bias"].any()
    assert grads["bert.pooler.dense.weight"].any()
