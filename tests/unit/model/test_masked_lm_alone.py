"""model.objective "mlm": no weight that gets no gradient, and whose weights it begins with."""

from dataclasses import replace

import pytest
import torch

from bert_tools.bench.flops import model_flops
from checkpoint_cases import save_checkpoint
from graph_cases import ONE_RANK
from mlperf_bert.checkpoint.load import load_weights
from mlperf_bert.checkpoint.manifest import CheckpointState
from mlperf_bert.config.files import load_config
from mlperf_bert.errors import CheckpointError
from mlperf_bert.model.bert import BertForPretraining, make_model
from mlperf_bert.optim.optimizers import make_optimizer_alone
from model_cases import CPU, TINY, ragged_batch

ALONE = replace(TINY, objective="mlm")
LENGTHS = (7, 31, 12, 64, 5, 40, 33)
NEXT_SENTENCE = ("bert.pooler.", "cls.seq_relationship.")


def test_only_what_next_sentences_need_is_missing():
    both, alone = (set(BertForPretraining(config, CPU).state_dict()) for config in (TINY, ALONE))
    assert both - alone == {name for name in both if name.startswith(NEXT_SENTENCE)}
    assert not alone - both


def test_flops_leave_out_the_pooler():
    batch = ragged_batch(LENGTHS)
    both, alone = (
        model_flops(config, batch.lengths, batch.masked_counts) for config in (TINY, ALONE)
    )
    assert alone.pooler == 0 < both.pooler
    assert alone.total == both.total - both.pooler


def test_weights_of_both_tasks_begin_masked_lm_alone_but_not_the_other_way(tiny_config, tmp_path):
    saved = {}
    for objective in ("mlm_nsp", "mlm"):
        config = load_config(tiny_config, [f"model.objective={objective}"])
        optimizer = make_optimizer_alone(config.optim, make_model(config, 1, CPU))
        state = CheckpointState(
            step=1, samples=16, seed=1, mlm_accuracy=None, vocabulary_sha256="ab"
        )
        place = tmp_path / objective
        saved[objective] = save_checkpoint(place, optimizer, config, state, ONE_RANK, CPU)
    model = load_config(tiny_config).model
    alone = BertForPretraining(replace(model, objective="mlm"), CPU, seed=9)
    load_weights(alone, saved["mlm_nsp"], "ab")
    both = BertForPretraining(model, CPU, seed=8)
    load_weights(both, saved["mlm_nsp"], "ab")
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, both.state_dict()[name]), name
    with pytest.raises(CheckpointError, match=r"bert\.pooler\.dense\.bias is missing"):
        load_weights(both, saved["mlm"], "ab")
