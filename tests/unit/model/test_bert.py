"""The whole model: size, names, initial weights, dropout, edge cases; of masked LM alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mlperf_logging import compliance_checker

from bert_tools.bench.flops import model_flops
from checkpoint_cases import save_checkpoint
from graph_cases import ONE_RANK
from mlperf_bert.checkpoint.load import load_weights
from mlperf_bert.checkpoint.manifest import CheckpointState
from mlperf_bert.config.files import load_config
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.batch import pad
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.model.bert import (
    BertBody,
    BertForPretraining,
    last_rows,
    make_model,
    tensorflow_name,
)
from mlperf_bert.model.layers import correct_predictions, loss_sums
from mlperf_bert.optim.optimizers import make_optimizer_alone
from model_cases import (
    CPU,
    TINY,
    gradients,
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


@pytest.mark.parametrize("ruleset", ["1.1.0", "2.0.0", "2.1.0"])
def test_bert_large_has_the_tensors_of_mlperfs_rules(ruleset):
    rules = (RULES / f"training_{ruleset}" / "closed_bert.yaml").read_text()
    asked_for = re.findall(r'"((?:bert|cls)/[^"]+)"', rules)
    ours = [tensorflow_name(name) for name in BertForPretraining(ModelSection(), META).state_dict()]
    assert len(asked_for) == 398
    assert sorted(ours) == sorted(asked_for)


def test_a_kernel_is_what_tensorflow_multiplies_from_the_right():
    modules = dict(BertForPretraining(TINY, META).named_modules())
    kernels = {
        f"{name}.weight" for name, module in modules.items() if isinstance(module, torch.nn.Linear)
    }
    kernels.remove("cls.seq_relationship.weight")  # stored as we do, and transposed when used
    with pytest.raises(ValueError, match="'step'"):
        tensorflow_name("step")
    for name in BertForPretraining(TINY, META).state_dict():
        assert tensorflow_name(name).endswith("/kernel") == (name in kernels)


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


@pytest.mark.parametrize("attention", ["reference", "grouped"])
def test_last_layer_computes_only_what_is_read(attention, monkeypatch):
    """Loss and gradients, dropout on, as if the last layer computed all tokens."""
    batch = ragged_batch((9, 30, 1, 12))
    batch.masked_token_index[0] = 0  # a first token that is masked as well
    config = replace(TINY, attention=attention, hidden_dropout=0.2, attention_dropout=0.3)
    model = scattered_model(config, spread=0.1, dtype=torch.float64)
    saving = our_loss(model, batch)
    computed = []

    def all_rows(body, *arguments):
        *of_batch, queries = arguments
        hidden = whole(body, *of_batch)
        computed.append(len(hidden))
        return hidden[queries.rows]

    whole = BertBody.forward
    monkeypatch.setattr(BertBody, "forward", all_rows)
    wasting = our_loss(model, batch)
    assert computed == [52]
    torch.testing.assert_close(saving, wasting, rtol=1e-9, atol=0)
    ours, theirs = gradients(model, saving), gradients(model, wasting)
    assert worst_gradient_difference(ours, theirs) < 1e-9


def test_rows_of_a_padded_batch_belong_to_their_sequences():
    batch = ragged_batch((9, 30, 12))
    shape = StaticShape(tokens=64, sequences=5, masked=14, max_seqlen=32, max_masked=6)
    padded = pad(batch, shape)
    queries, place = last_rows(padded, 32, len(padded.next_sentence_label))
    first, masked = queries.rows[place].tensor_split((5,))
    last = padded.cu_seqlens[-1] - 1  # which stands for the slot without a sequence
    torch.testing.assert_close(first, padded.cu_seqlens[:5].long().clamp(max=last))
    torch.testing.assert_close(masked, padded.masked_token_index)
    assert queries.cu_seqlens.diff().tolist() == list(queries.lengths)
    assert padded.lengths[4] == 0 and max(queries.lengths) <= queries.max_length == 7
    for number, rows in enumerate(queries.rows.split(queries.lengths)):
        own = padded.cu_seqlens[number : number + 2].tolist()
        assert all(own[0] <= row < own[1] for row in rows.tolist())


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


def test_of_masked_lm_alone_only_what_next_sentences_need_is_missing():
    configs = TINY, replace(TINY, objective="mlm")
    both, alone = (set(BertForPretraining(config, CPU).state_dict()) for config in configs)
    theirs = ("bert.pooler.", "cls.seq_relationship.")
    assert both - alone == {name for name in both if name.startswith(theirs)}
    assert not alone - both
    flops, fewer = (model_flops(config, (7, 31, 12), (1, 4, 2)) for config in configs)
    assert fewer.pooler == 0 < flops.pooler
    assert fewer.total == flops.total - flops.pooler


def test_weights_of_both_tasks_begin_masked_lm_alone(tiny_config, tmp_path):
    """The other way is refused (test_first_weights.py)."""
    config = load_config(tiny_config)
    both = make_model(config, 1, CPU)
    state = CheckpointState(step=1, samples=16, seed=1, mlm_accuracy=None, vocabulary_sha256="ab")
    optimizer = make_optimizer_alone(config.optim, both)
    saved = save_checkpoint(tmp_path, optimizer, config, state, ONE_RANK, CPU)
    alone = BertForPretraining(replace(config.model, objective="mlm"), CPU, seed=9)
    load_weights(alone, saved, "ab")
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, both.state_dict()[name]), name
